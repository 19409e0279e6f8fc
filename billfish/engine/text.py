"""Token ids to text while a sequence grows: whole characters only, and nothing of a stop string.

Uses the tokenizer's `decode` alone: subwords, byte tokens and markers of spaces all come out right
if a few tokens before the new one are decoded with it.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import transformers

HALF = "\ufffd"  # what decoders print for bytes that are not (yet) a character
# A decoder with byte fallback (Llama 2) prints one for each byte of a run that is not valid as a
# whole: 4 bytes of the last character, already shown, and 3 of the next.
HELD = 8
CONTEXT = 8  # prompt tokens before the first new one; 1 would do if none decoded to nothing
LONG = 128  # tokens without a whole character at their end; see _shorten


class Vocabulary:
    """A tokenizer, for all detokenizers: what they ask about a token is computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self.size = len(tokenizer)  # logits may be wider than the vocabulary
        added = tokenizer.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special}
        kind, fast = type(tokenizer), transformers.PreTrainedTokenizerFast
        self._given = {"clean_up_tokenization_spaces": False}
        self._decode = tokenizer.decode
        # transformers' own decode only prepares this call, for twice its time.
        if all(getattr(kind, n, 0) is getattr(fast, n, 1) for n in ("decode", "_decode")):
            self._decode, self._given = tokenizer.backend_tokenizer.decode, {}
        self._lengths = array("i", [-1]) * self.size

    def decode(self, tokens: list[int]) -> str:
        text: str = self._decode(tokens, skip_special_tokens=False, **self._given)
        return text

    def length(self, tokens: list[int]) -> int:
        """Of the text of these alone."""
        if len(tokens) != 1:
            return len(self.decode(tokens))
        found = self._lengths[tokens[0]]
        if found < 0:
            found = self._lengths[tokens[0]] = len(self.decode(tokens))
        return found


class Detokenizer:
    """Incremental text of one sequence; the concatenation is the decoded sequence.

    Keeps a window, the tokens since the last but one whole character, and decodes it alone: what
    the decoder does to a first token (dropping its space) then falls on text already shown. With a
    prompt the text is what follows the prompt's, so a first space is kept, as in vLLM; without one
    it is `tokenizer.decode(tokens)`. Spaces before full stops are left as the model wrote them.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], skip_special: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        # Not in the window: a thousand of them would make it long and leave it without context.
        self._silent = vocabulary.special if skip_special else frozenset[int]()
        tail = prompt[-8 * CONTEXT :]
        self._window = [token for token in tail if not self._is_silent(token)][-CONTEXT:]
        self._whole = len(self._window)  # tokens of the window up to its last whole character
        text = vocabulary.decode(self._window)
        self._shown = len(text)  # characters of the window's text that are out
        self._prompt = text if text.endswith(HALF) else None

    def add(self, token: int) -> str:
        """The new text that is certain; "" while a character is incomplete."""
        if self._is_silent(token):
            return ""
        self._window.append(token)
        text = self._vocabulary.decode(self._window)
        end = max(len(text.rstrip(HALF)), len(text) - HELD)
        if self._prompt is not None:
            self._settle_prompt(self._prompt, text[:end])
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if new and end == len(text):
            self._window = self._window[self._whole :]
            self._whole = len(self._window)
            self._shown = self._vocabulary.length(self._window)
        elif len(self._window) % LONG == 0:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """Whatever is left, replacement characters included."""
        text = self._vocabulary.decode(self._window)
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _is_silent(self, token: int) -> bool:
        return token in self._silent or token >= self._vocabulary.size

    def _settle_prompt(self, whole: str, certain: str) -> None:
        """A prompt of token ids may end within a character, which then belongs to the output; or
        its text ends with a literal replacement character, which does not."""
        if len(certain) <= len(short := whole.rstrip(HALF)):
            return
        if not certain.startswith(whole):
            self._shown = len(short)
        self._prompt = None

    def _shorten(self, text: str) -> None:
        """Keeps the window bounded while bytes never become a character.

        UTF-8 resynchronises within 3 bytes, so half of the window decodes to the same end. Where it
        does not, the window stays.
        """
        window, self._window = self._window, self._window[-LONG // 2 :]
        short = self._vocabulary.decode(self._window)
        if len(short) > HELD and text.endswith(short[-HELD - 1 :]):
            self._shown -= len(text) - len(short)
            self._whole = 0
        else:
            self._window = window


class StopFinder:
    """Holds back text that may be the beginning of a stop string.

    The stop string that is complete first counts, and of several that end together the longest, so
    that the result does not depend on how the text arrives.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops, self._include = stops, include
        self._held = ""
        self.found: str | None = None  # which one

    def add(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was found: the text ends there)"""
        if self.found is not None:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        starts = [(text.find(stop), stop) for stop in self._stops]
        if found := [(at + len(stop), at, stop) for at, stop in starts if at >= 0]:
            end, at, self.found = min(found)
            self._held = ""
            return text[: end if self._include else at], True
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
