"""Token ids to text while a sequence grows: whole characters only, and nothing of a stop string.

Uses the tokenizer's `decode` alone: subwords, byte tokens and markers of spaces all come out right
if a few tokens before the new one are decoded with it.
"""

from collections.abc import Sequence
from typing import Any

HALF = "\ufffd"  # what decoders print for bytes that are not (yet) a character
# A decoder with byte fallback (Llama 2) prints one for each byte of a run that is not valid as a
# whole: 4 bytes of the last character, already shown, and 3 of the next.
HELD = 8
CONTEXT = 8  # prompt tokens before the first new one; 1 would do if none decoded to nothing
LONG = 128  # tokens without a whole character at their end; see _shorten


class Detokenizer:
    """Incremental text of one sequence; the concatenation is the decoded sequence.

    Keeps a window, the tokens since the last but one whole character, and decodes it alone: what
    the decoder does to a first token (dropping its space) then falls on text already shown. With a
    prompt the text is what follows the prompt's, so a first space is kept, as in vLLM; without one
    it is `tokenizer.decode(tokens)`. Spaces before full stops are left as the model wrote them.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)  # logits may be wider than the vocabulary
        added = tokenizer.added_tokens_decoder
        # Not in the window: a thousand of them would make it long and leave it without context.
        self._silent = {i for i, token in added.items() if token.special} if skip_special else set()
        tail = prompt[-8 * CONTEXT :]
        self._window = [token for token in tail if not self._is_silent(token)][-CONTEXT:]
        self._whole = len(self._window)  # tokens of the window up to its last whole character
        text = self._decode()
        self._shown = len(text)  # characters of the window's text that are out
        self._prompt = text if text.endswith(HALF) else None

    def add(self, token: int) -> str:
        """The new text that is certain; "" while a character is incomplete."""
        if self._is_silent(token):
            return ""
        self._window.append(token)
        text = self._decode()
        end = max(len(text.rstrip(HALF)), len(text) - HELD)
        self._settle_prompt(text[:end])
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if new and end == len(text):
            self._window = self._window[self._whole :]
            self._whole = len(self._window)
            self._shown = len(self._decode())
        elif len(self._window) % LONG == 0:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """Whatever is left, replacement characters included."""
        text = self._decode()
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _is_silent(self, token: int) -> bool:
        return token in self._silent or token >= self._size

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _settle_prompt(self, certain: str) -> None:
        """A prompt of token ids may end within a character, which then belongs to the output; or
        its text ends with a literal replacement character, which does not."""
        if self._prompt is None or len(certain) <= len(whole := self._prompt.rstrip(HALF)):
            return
        if not certain.startswith(self._prompt):
            self._shown = len(whole)
        self._prompt = None

    def _shorten(self, text: str) -> None:
        """Keeps the window bounded while bytes never become a character.

        UTF-8 resynchronises within 3 bytes, so half of the window decodes to the same end. Where it
        does not, the window stays.
        """
        window, self._window = self._window, self._window[-LONG // 2 :]
        short = self._decode()
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
