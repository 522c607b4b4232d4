"""The text of an output: where a stop string ends it, and what may be shown while it grows.

One rule for tokens and text: an output ends with the token that completes a stop string, and its
text ends before the string. Where one token completes several, the one that is complete first,
character by character, counts. So the text is the same whatever the blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_lab.load import Pair
from dflash_lab.trace import DecodeRequest

HALF = "\ufffd"  # what the beginning of a character decodes to


def settled(text: str) -> str:
    """A beginning without what the next token may still turn into a character."""
    return text.rstrip(HALF)


def stop_place(text: str, strings: Sequence[str]) -> int | None:
    """Where the first complete stop string begins; None where there is none."""
    text = settled(text)
    starts = {string: text.find(string) for string in strings}
    found = [(start + len(string), start) for string, start in starts.items() if start >= 0]
    return min(found)[1] if found else None


def heeded_ends(tokens: Sequence[int], request: DecodeRequest) -> frozenset[int]:
    """The stop tokens that end an output of this length: none where it is too short for one."""
    return request.stop_tokens if len(tokens) >= request.min_new_tokens else frozenset()


def text_before_end(pair: Pair, tokens: Sequence[int], request: DecodeRequest) -> str:
    """The text of all tokens but one that ended them; stop strings are not looked for."""
    return pair.text(tokens, heeded_ends(tokens, request))


def is_stopped(pair: Pair, tokens: Sequence[int], request: DecodeRequest) -> bool:
    """Whether a stop string is complete in an output."""
    strings = request.stop_strings
    return bool(strings) and stop_place(text_before_end(pair, tokens, request), strings) is not None


def output_text(pair: Pair, tokens: Sequence[int], request: DecodeRequest) -> str:
    """The text of an output, without the end token or the stop string that ended it."""
    text = text_before_end(pair, tokens, request)
    return text[: stop_place(text, request.stop_strings)]


def output_pieces(pair: Pair, tokens: Sequence[int], request: DecodeRequest) -> tuple[str, ...]:
    """What each token adds: the pieces joined are `output_text`."""
    room, pieces = len(output_text(pair, tokens, request)), []
    for piece in pair.pieces(tokens, heeded_ends(tokens, request)):
        pieces.append(piece[:room])
        room -= len(pieces[-1])
    return tuple(pieces)


class StopStrings:
    """Stop strings in an output that grows; they may begin in one block and end in another."""

    def __init__(self, strings: Sequence[str], read: Callable[[Sequence[int]], str]):
        self.strings, self.read = strings, read
        self.found = False
        self._tokens: list[int] = []

    def kept(self, tokens: Sequence[int]) -> int:
        """How many of the next tokens the output takes: up to the one that completes a string."""
        if not self.strings:
            return len(tokens)
        count = self._completing(tokens)
        self.found = count is not None
        self._tokens += tokens[:count]
        return len(tokens) if count is None else count

    def _completing(self, tokens: Sequence[int]) -> int | None:
        """The number of the token that completes a string; None where none does."""
        text = self._text(tokens)
        # A half character may hide whole ones: some tokenizers read the bytes beside it together.
        if HALF not in text and stop_place(text, self.strings) is None:
            return None
        texts = (self._text(tokens[:count]) for count in range(1, len(tokens) + 1))
        found = (n for n, text in enumerate(texts, 1) if stop_place(text, self.strings) is not None)
        return next(found, None)

    def _text(self, more: Sequence[int]) -> str:
        return self.read([*self._tokens, *more])


class TextStream:
    """The text of an output piece by piece; the pieces joined are `output_text`.

    Held back until it is sure: half a character, and what may be the beginning of a stop string.
    """

    def __init__(self, pair: Pair, request: DecodeRequest):
        self.pair, self.request = pair, request
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, tokens: Sequence[int]) -> None:
        """Take the tokens of the next record."""
        self.tokens += tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return is_stopped(self.pair, self.tokens, self.request)

    def piece(self, ended: bool) -> str:
        """What may be shown after the pieces before: all that is left where the output ended."""
        if ended:
            text = output_text(self.pair, self.tokens, self.request)
        else:
            text = without_beginning(self._sure(), self.request.stop_strings)
            if not text.startswith(self.shown):
                return ""
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece

    def _sure(self) -> str:
        """What no next token takes back.

        Tokenizers that read single bytes together make half characters of whole ones again where
        one more byte does not fit; so what such a byte completed waits for the next token.
        """
        text = settled(self.pair.text_so_far(self.tokens))
        if HALF not in self.pair.text_so_far(self.tokens[-1:]):
            return text
        before = settled(self.pair.text_so_far(self.tokens[:-1]))
        return before if text.startswith(before) else ""


def without_beginning(text: str, strings: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a stop string."""
    longest = max(map(len, strings), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return text[:-size]
    return text
