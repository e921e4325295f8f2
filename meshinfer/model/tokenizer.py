"""Text to tokens and back, for one model: its `tokenizer.json`, read by the `tokenizers` library.

A person's text is not trusted to be just text: written out, `<|im_end|>` would end their message and begin
another. Templates render a whole conversation to one string, where that can no longer be told apart. So
before rendering, `guard` replaces each special token's spelling in a person's text by a stand-in of
noncharacters (which no text may hold, and which templates copy like any letter), and `encode` turns these
back into the spelling, encoded as plain text. A text that spells no special token passes unchanged, and
so gets the very tokens that the model was trained on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from meshinfer import limits
from meshinfer.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

# U+FDD0…U+FDEF are noncharacters: "intended for process-internal uses" (Unicode 23.7).
_OPEN: Final = "\ufdd0"
_CLOSE: Final = "\ufdd1"
_DIGIT: Final = 0xFDE0
_STAND_IN: Final = re.compile(f"{_OPEN}([\ufde0-\ufdef]{{1,8}}){_CLOSE}")
_NONCHARACTERS: Final = re.compile("[\ufdd0-\ufdef]")


class Tokenizer:
    """One model's tokenizer. Calls may come from any thread; a text of 1,000 characters takes about 1 ms.

    `eos` are the tokens that end an answer; `bos` is the token that begins a text, if the model has one.
    """

    def __init__(self, tokenizer_json: bytes, eos: Iterable[int] = (), bos: int | None = None) -> None:
        """Raises `ModelError` when `tokenizer_json` is too large or nothing that the library can read."""
        self._tokenizer = _load(tokenizer_json)
        self._lock = threading.Lock()
        self.vocabulary: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos = frozenset(eos)
        self.bos = bos

    @cached_property
    def special(self) -> dict[str, int]:
        """The special tokens by their spelling."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in added.items() if token.special and token.content}

    @cached_property
    def begins_with_bos(self) -> bool:
        """Whether the model was trained on texts that begin with `bos`: so says the tokenizer's post-
        processor.
        """
        return self.bos is not None and self._ids("", special=True, processed=True)[:1] == [self.bos]

    def spelling(self, token: int) -> str:
        """How a token is written in the vocabulary, as templates expect of `bos_token`; "" for an unknown
        one.
        """
        return self._tokenizer.id_to_token(token) or ""

    def guard(self, text: str) -> str:
        """`text` as a template may take it in, without any special token in it. `encode` restores the
        spelling.
        """
        clean = _NONCHARACTERS.sub("\ufffd", text)
        return (
            self._spellings.sub(lambda match: _stand_in(self.special[match[0]]), clean)
            if self.special
            else clean
        )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The tokens of `text`, nothing put before or after them.

        With `special`, spelled-out special tokens become these tokens (for a rendered template), except where
        `guard` stood in for them; without, all is plain text (for what a person wrote).
        """
        if not special:
            return self._ids(text, special=False)
        ids: list[int] = []
        # split() with a group alternates: text, digits of a stand-in, text, …
        for index, part in enumerate(_STAND_IN.split(text)):
            if index % 2:
                ids += self._ids(self.spelling(_token(part)), special=False)
            elif part:
                ids += self._ids(part, special=True)
        return ids

    def encode_prompt(self, rendered: str) -> list[int]:
        """The tokens of a rendered template, begun with `bos` where the model wants it and the template has
        none.
        """
        ids = self.encode(rendered, special=True)
        if self.bos is not None and self.begins_with_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; U+FFFD for bytes that form no character (yet)."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        longest_first = sorted(self.special, key=lambda spelling: (-len(spelling), spelling))
        return re.compile("|".join(map(re.escape, longest_first)))

    def _ids(self, text: str, special: bool, processed: bool = False) -> list[int]:
        # The library holds "special tokens are plain text" as a setting of the tokenizer, not of the call.
        with self._lock:
            self._tokenizer.encode_special_tokens = not special
            return self._tokenizer.encode(text, add_special_tokens=processed).ids


def _load(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    if len(tokenizer_json) > limits.TOKENIZER_BYTES:
        raise ModelError(
            f"tokenizer.json has {len(tokenizer_json):,} bytes; at most {limits.TOKENIZER_BYTES:,} are read"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    except Exception as error:  # The library raises bare Exception for all that it cannot read.
        raise ModelError(
            f"tokenizer.json cannot be read ({str(error)[:200]}): pull the model again"
        ) from error
    # A file may ask for cutting or padding, which would change a prompt in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _stand_in(token: int) -> str:
    return _OPEN + "".join(chr(_DIGIT + int(digit, 16)) for digit in f"{token:x}") + _CLOSE


def _token(digits: str) -> int:
    return int("".join(f"{ord(digit) - _DIGIT:x}" for digit in digits), 16)
