"""A tiny checkpoint whose tokens are bytes, as those of real models are, and what it may write."""

from pathlib import Path

from tiny import write_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = [("t", "h"), ("th", "e"), ("{", '"'), ('"', ":"), ("}", "}"), ("Ġ", "a"), ('"', ",")]
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> write "
    "<tool_call>{% endif %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}"
)
LLAMA = HERMES.replace("<tool_call>", '{"name": function name, "parameters": dictionary}')
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def byte_tokenizer(template=PLAIN, special=()):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<eos>", *letters, *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(tokens)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(one, special=True) for one in ("<eos>", *special)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def write_byte_checkpoint(path: Path, template=PLAIN, special=()) -> Path:
    write_checkpoint(path, vocab_size=288, max_position_embeddings=2048)
    byte_tokenizer(template, special).save_pretrained(path)
    return path
