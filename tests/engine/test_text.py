"""Text that grows token by token is the decoded sequence, in whole characters, up to a stop."""

import random

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import character_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from billfish.engine.text import HALF, Detokenizer, StopFinder, Vocabulary

LINES = [
    "The billfish swims past 7 boats, doesn't it? Yes.",
    "旗鱼游得很快。旗鱼是鱼。你好世界。",
    "😀 emoji 👩‍👩‍👧 and 🐟🐟 fish, naïve café — “quoted”  two  spaces\n\ttab",
    "a genuine \ufffd and two \ufffd\ufffd in the text",
]


def wrapped(core, **special):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def byte_level():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    core.train_from_iterator(LINES, trainer)
    core.add_tokens(["<think>"])  # added, and not special
    return wrapped(core, eos_token="<eos>")


def metaspace():
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<eos>"], show_progress=False
    )
    core.train_from_iterator(LINES, trainer)
    return wrapped(core, eos_token="<eos>", unk_token="<unk>")


def byte_fallback():
    """As Llama 2: characters it does not know are bytes, each a token of its own."""
    known = ["<unk>", "<eos>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehilnorstw"]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(known)},
        merges=[],
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(core, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {
    "byte level": byte_level(),
    "metaspace": metaspace(),
    "character": character_tokenizer(),
    "byte fallback": byte_fallback(),
}
every = pytest.mark.parametrize("name", TOKENIZERS)


def pieces(tokenizer, ids, prompt=(), skip_special=True):
    words = Detokenizer(Vocabulary(tokenizer), prompt, skip_special)
    return [*(words.add(token) for token in ids), words.finish()]


@every
@pytest.mark.parametrize("line", LINES)
def test_text_comes_out_as_decoded(name, line):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(line, add_special_tokens=False).input_ids
    out = pieces(tokenizer, ids)
    assert "".join(out) == tokenizer.decode(ids, skip_special_tokens=True)
    if name in ("byte level", "byte fallback"):
        assert "".join(out) == line
    if HALF not in line:
        assert not any(HALF in piece for piece in out)
        assert out[-1] == ""  # nothing waits at the end of whole text


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "byte fallback"])
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 80), skip=st.booleans())
def test_any_tokens_at_all(name, seed, length, skip):
    """Random tokens: bytes in the wrong order, special ones in the middle."""
    tokenizer, source = TOKENIZERS[name], random.Random(seed)
    ids = [source.randrange(len(tokenizer)) for _ in range(length)]
    out = pieces(tokenizer, ids, skip_special=skip)
    assert "".join(out) == tokenizer.decode(ids, skip_special_tokens=skip)
    # And behind a prompt: what the whole has beyond the prompt, whose last character is whole.
    prompt = tokenizer("ab 12", add_special_tokens=False).input_ids
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert before + "".join(pieces(tokenizer, ids, prompt, skip)) == whole


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 255), max_size=400), st.integers(0, 3))
@example([0xF0, 0x9F, 0x98] * 130, 0)
@example([0x80] * 400, 0)
@example([0xF0, 0x9F, 0x98, 0x80] * 60 + [0xE4, 0xBD], 1)
def test_any_bytes_at_all(values, end):
    tokenizer = TOKENIZERS["byte level"]
    sign = {b: tokenizer.convert_tokens_to_ids(c) for b, c in bytes_to_signs().items()}
    ids = [token for value in values for token in [sign[value]] + [tokenizer.eos_token_id] * end]
    out = pieces(tokenizer, ids)
    assert (
        "".join(out)
        == bytes(values).decode(errors="replace")
        == tokenizer.decode(ids, skip_special_tokens=True)
    )


def bytes_to_signs():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def test_characters_are_never_cut():
    tokenizer = TOKENIZERS["byte level"]
    ids = [tokenizer.convert_tokens_to_ids(bytes_to_signs()[b]) for b in "a😀é旗".encode()]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "😀", "", "é", "", "", "旗", ""]
    assert pieces(tokenizer, ids[:3]) == ["a", "", "", HALF]  # left over at the end
    fallback = TOKENIZERS["byte fallback"]
    ids = fallback("😀旗😀", add_special_tokens=False).input_ids
    shown = [piece for piece in pieces(fallback, ids) if piece]
    assert shown == ["😀", "旗", "😀"]


def test_spaces_after_a_prompt_stay():
    for name in ("metaspace", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        prompt, ids = (tokenizer(t, add_special_tokens=False).input_ids for t in ("hello", "world"))
        assert "".join(pieces(tokenizer, ids)).startswith("w")
        assert "".join(pieces(tokenizer, ids, prompt)).startswith(" w")
        # A special token between them has no text, and takes none away.
        end = [tokenizer.eos_token_id] * 20
        assert "".join(pieces(tokenizer, [*end, *ids], [*prompt, *end])).startswith(" w")


def test_special_and_unknown_tokens():
    tokenizer = TOKENIZERS["byte level"]
    end, think = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<think>")
    assert pieces(tokenizer, [end, think, end, 10**6]) == ["", "<think>", "", "", ""]
    assert "".join(pieces(tokenizer, [end, think], skip_special=False)) == "<eos><think>"


def test_a_prompt_that_ends_inside_a_character():
    tokenizer = TOKENIZERS["byte level"]
    ids = [tokenizer.convert_tokens_to_ids(bytes_to_signs()[b]) for b in "ab😀c".encode()]
    for cut in (3, 4, 5):
        assert "".join(pieces(tokenizer, ids[cut:], ids[:cut])) == "😀c"
    genuine = tokenizer("ab\ufffd", add_special_tokens=False).input_ids
    assert "".join(pieces(tokenizer, ids[-1:], genuine)) == "c"


@every
def test_texts_share_a_vocabulary(name):
    """Which remembers how long tokens are alone."""
    tokenizer = TOKENIZERS[name]
    vocabulary = Vocabulary(tokenizer)
    for line in 2 * LINES:
        ids = tokenizer(line, add_special_tokens=False).input_ids
        words = Detokenizer(vocabulary, ())
        text = "".join([*map(words.add, ids), words.finish()])
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
    for token in 2 * [*range(len(tokenizer))]:
        assert vocabulary.length([token]) == len(tokenizer.decode([token]))
    assert vocabulary.length(ids) == len(tokenizer.decode(ids))


@pytest.mark.parametrize("method", ["decode", "_decode"])
def test_a_decode_of_its_own_is_asked(method):
    """Where a tokenizer does more than transformers' do."""

    def loud(self, *given, **named):
        return getattr(transformers.PreTrainedTokenizerFast, method)(self, *given, **named).upper()

    kind = type("Loud", (transformers.PreTrainedTokenizerFast,), {method: loud})
    core = TOKENIZERS["byte level"].backend_tokenizer
    ids = core.encode("fish").ids
    assert Vocabulary(kind(tokenizer_object=core)).decode(ids) == "FISH"
    assert Vocabulary(wrapped(core)).decode(ids) == "fish"


def test_spaces_are_left_as_they_were_written():
    core = Tokenizer(models.WordLevel({"no": 0, ".": 1}))
    tidy = wrapped(core, clean_up_tokenization_spaces=True)
    assert tidy.decode([0, 1, 0]) == "no. no"
    assert Vocabulary(tidy).decode([0, 1, 0]) == "no . no"


def test_work_does_not_grow_with_the_text():
    tokenizer = TOKENIZERS["byte level"]
    most = 0

    class Watched:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def __len__(self):
            return len(tokenizer)

        def decode(self, ids, **options):
            nonlocal most
            most = max(most, len(ids))
            return tokenizer.decode(ids, **options)

    ids = tokenizer(" ".join(LINES) * 20, add_special_tokens=False).input_ids
    assert "".join(pieces(Watched(), ids)) == tokenizer.decode(ids)
    assert most <= 12
    junk = tokenizer.convert_tokens_to_ids(bytes_to_signs()[0x80])
    assert "".join(pieces(Watched(), [junk] * 2000)) == HALF * 2000
    assert most <= 128


def reference_stop(text, stops):
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def shown(parts, stops):
    finder, out = StopFinder(stops), ""
    for i, part in enumerate(parts):
        text, stopped = finder.add(part)
        out += text
        # Never a character that is not part of the answer, at any time.
        assert reference_stop("".join(parts), stops)[0].startswith(out)
        assert stopped == reference_stop("".join(parts[: i + 1]), stops)[1]
    return out + finder.finish(), reference_stop("".join(parts), stops)[1]


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
@example(["a", "b", "c", "d"], ["abcd", "bc"])
@example(["aab", "aaab"], ["aaab"])
@example(["xEN", "D", "more"], ["END", "EN!"])
def test_stops_do_not_depend_on_the_pieces(parts, stops):
    stops = tuple(stops)
    assert shown(parts, stops) == reference_stop("".join(parts), stops)
    assert shown(["".join(parts)], stops) == reference_stop("".join(parts), stops)


def test_stop_finder_holds_back_no_more_than_it_must():
    finder = StopFinder(("</s>", "\n\n"))
    assert finder.add("one\n") == ("one", False)
    assert finder.add("two <") == ("\ntwo ", False)
    assert finder.add("b></") == ("<b>", False)
    assert finder.finish() == "</"
    assert finder.finish() == ""
    assert StopFinder(()).add("anything") == ("anything", False)
    finder = StopFinder(("stop",))
    assert finder.found is None
    assert finder.add("a stop b") == ("a ", True)
    assert finder.found == "stop"
    assert finder.add("more") == ("", True)
    assert finder.finish() == ""
