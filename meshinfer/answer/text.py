"""Tokens to text while they come: whole characters only, and nothing of a stop string.

Decoding everything again for each token would cost ever more; decoding each token alone would be wrong,
because characters span tokens and some decoders treat the first token differently (a leading space is
dropped). So a short window of the latest tokens is decoded, and what its text has more than before is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]
"""Text of tokens without special ones; U+FFFD stands for bytes that form no character, or none yet."""

_BROKEN: Final = "\ufffd"

_CHARACTER_BYTES: Final = 4
"""UTF-8 has at most so many to a character, and a token holds one at least."""

_PATIENCE_TOKENS: Final = 2 * _CHARACTER_BYTES
"""Several broken characters at the end may be one whose bytes are still coming. What so many tokens have not
completed is no text; twice the need, because a U+FFFD that the model really wrote looks broken as well."""

_WINDOW_TOKENS: Final = 12
"""A window this long is cut back: half of it is decoded on average, some 5 µs."""


class TextStream:
    """The text of one answer, piece by piece; the pieces together are what decoding all tokens at once gives.

    Ends by itself (`stopped`) where the first of the stop strings begins.
    """

    __slots__ = ("_gate", "_window")

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        """`stops`: texts that end the answer, none of them empty."""
        self._window = _Window(decode)
        self._gate = _Gate(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; nothing comes after it."""
        return self._gate.stopped

    def push(self, token: int) -> str:
        """What may be shown now that `token` has come; "" while a character or a stop string is open."""
        return self._gate.push(self._window.push(token))

    def finish(self) -> str:
        """What was held back, when no more tokens come; an incomplete character shows as U+FFFD."""
        return self._gate.push(self._window.finish()) + self._gate.finish()


class _Window:
    """Decodes tokens one by one, in whole characters."""

    __slots__ = ("_clean", "_decode", "_open", "_shown", "_tokens")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = 0
        """Characters of the window's text that are out."""
        self._clean = 0
        """Index where the latest tokens begin that showed something and began at a character's start."""
        self._open = 0
        """Latest tokens that ended within a character."""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        new = text[self._shown :]
        if new.endswith(_BROKEN):
            return self._within(text, new)
        begin = len(self._tokens) - 1 - self._open
        self._open = 0
        if new:
            self._clean = begin
            self._shown = len(text)
        elif self._shown:
            self._tokens.pop()  # a special token: it shows nothing, and nothing depends on it
        if len(self._tokens) >= _WINDOW_TOKENS:
            self._cut_back(self._clean if self._shown else len(self._tokens) // 2)
        return new

    def finish(self) -> str:
        return self._decode(self._tokens)[self._shown :] if self._open else ""

    def _within(self, text: str, new: str) -> str:
        """The text seems to end within a character: waits for the rest of it, but not forever."""
        self._open += 1
        if new[-2:-1] == _BROKEN and self._open < _PATIENCE_TOKENS:
            return ""  # decoders with a token per byte show the whole characters before it as broken too
        self._shown = len(text) - 1
        if len(self._tokens) >= _WINDOW_TOKENS:
            self._cut_back(len(self._tokens) - _CHARACTER_BYTES, held=1)
        return new[:-1]

    def _cut_back(self, begin: int, held: int = 0) -> None:
        """Forgets the tokens before `begin`; the last `held` characters are still to be shown."""
        del self._tokens[:begin]
        self._clean = max(0, self._clean - begin)
        self._shown = max(0, len(self._decode(self._tokens)) - held)


class _Gate:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one."""

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string stops everything")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self.stopped or not text:
            return ""
        self._held += text
        found = self._found()
        begun = self._begun()
        # A stop string that is complete waits for one that began before it and may yet be: the text then ends
        # where the earliest begins, however it was cut into tokens.
        self.stopped = found <= begun and found < len(self._held)
        return self._release(min(found, begun))

    def finish(self) -> str:
        if self.stopped:
            return ""
        found = self._found()
        self.stopped = found < len(self._held)
        return self._release(found)

    def _release(self, end: int) -> str:
        released, self._held = self._held[:end], self._held[end:]
        return released

    def _found(self) -> int:
        """Where the earliest complete stop string begins; the length of the text if there is none."""
        places = (self._held.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=len(self._held))

    def _begun(self) -> int:
        """Where the earliest stop string begins that the text's end cuts off; else the text's length."""
        return min(_begun(self._held, stop) for stop in self._stops)


def _begun(text: str, stop: str) -> int:
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return place if place >= 0 else len(text)
