"""What a name or sentence from another PC may contain, before a terminal, a log or a page shows it.

A peer chooses its own name; escape sequences in it could rewrite another person's terminal, and direction
marks or invisible characters could make it look like somebody else's. So text is cleaned where it is written
(`printable`) and refused where it is read (`is_printable`). The ranges stand here literally, not as Unicode
categories: those change with Python's Unicode version, and two PCs must agree on what a valid message is.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_SPACE: Final = re.compile("[\t\n\v\f\r\u0085\u2028\u2029]+")

_FORBIDDEN: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters: terminal escapes begin here
    "\u00ad\u061c\u180e\u200b\u200e\u200f"  # soft hyphen, direction, zero-width space; not the joiners
    "\u2028-\u202e\u2060-\u206f"  # line separators, direction overrides and isolates, invisible operators
    "\ud800-\udfff\ufeff\ufff9-\ufffb"  # surrogates have no UTF-8; byte order mark; annotations
    "\U000e0000-\U000e0fff"  # tags: invisible text
    "]"
)


def printable(text: str, limit: int) -> str:
    """The nearest text that may be sent: NFC, one line, nothing invisible, at most `limit` characters."""
    line = _SPACE.sub(" ", unicodedata.normalize("NFC", text))
    return _FORBIDDEN.sub("\ufffd", line).strip()[:limit].rstrip()


def is_printable(text: str, limit: int) -> bool:
    """Whether `printable` would leave the text as it is."""
    if len(text) > limit:
        return False
    if text.isascii() and text.isprintable():
        return text == text.strip()
    return printable(text, limit) == text
