"""Chat templates: the text equals transformers'; endless and failing templates are stopped."""

import time

import pytest
from tiny import character_tokenizer

from billfish.errors import UserError
from billfish.models import template
from billfish.models.generate import encode
from billfish.models.template import Renderer

MESSAGES = [{"role": "user", "content": "a \u20ac and <b>"}, {"role": "assistant", "content": "x"}]
REAL = (
    "{%- for m in messages %}{{ bos_token }}<|{{ m.role }}|>\n{{ m['content'] | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DOUBLING = (
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "longer than",
    "{{ 10 ** (10 ** 9) }}": "longer than",
    "{{ 'a' * 10 ** 10 }}": "it needs more than",
    "{{ '%10000000000d' % 1 }}": "it needs more than",
    "{{ 'a'.center(10 ** 10) }}": "it needs more than",
    DOUBLING: "it needs more than",
    "{% for i in range(999) %}{{ 'a' * 9999 }}{% endfor %}": "9989001 characters, of 8388608",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "Recursion",
    "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}": "failed",
    "{{ raise_exception('roles must alternate') }}": "TemplateError: roles must alternate",
    "{% for %}": "TemplateSyntaxError",
    "{{ nobody.knows.this }}": "UndefinedError: 'nobody' is undefined",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "\ud800": "surrogates not allowed",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
}


@pytest.fixture(scope="module")
def renderer():
    with pytest.MonkeyPatch.context() as patch, Renderer() as made:
        patch.setattr(template, "SECONDS", 1)
        patch.setattr(template, "MEMORY", 2**27)
        yield made


@pytest.fixture
def tokenizer():
    return character_tokenizer()


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_it_is_what_transformers_renders(tools, renderer, tokenizer):
    tokenizer.chat_template = REAL
    wanted = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert renderer.render(tokenizer, MESSAGES, tools) == wanted


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:30])
def test_a_template_that_fails_is_one_sentence(text, renderer, tokenizer):
    tokenizer.chat_template = text
    start = time.monotonic()
    with pytest.raises(UserError, match="this model's chat template") as told:
        renderer.render(tokenizer, MESSAGES)
    assert HOSTILE[text] in str(told.value) and len(str(told.value)) < 500
    assert time.monotonic() - start < 20
    if "longer" not in HOSTILE[text]:  # the next one is rendered, by the same process
        tokenizer.chat_template = REAL
        assert renderer.render(tokenizer, MESSAGES).endswith("<|assistant|>")


def test_closing_ends_its_process(tokenizer):
    made = Renderer()
    made.start()
    process = made._process
    made.close()
    assert process.returncode == -9
    with pytest.raises(UserError, match="closed"):
        made.render(tokenizer, MESSAGES)


def test_generate_says_it_in_one_sentence(tokenizer):
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(UserError, match="chat template failed: TemplateSyntaxError"):
        encode(tokenizer, "a", chat=True)
