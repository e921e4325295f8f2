"""All of Jinja that chat templates may use: methods, filters, tests, parts of the language."""

from __future__ import annotations

from typing import Final

from jinja2.runtime import LoopContext


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRING_METHODS = """
    capitalize count endswith find index isalnum isalpha isascii isdigit islower isspace istitle isupper join
    lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
"""
_LOOP_ATTRIBUTES = """
    cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0
"""
METHODS: Final[dict[type, frozenset[str]]] = {
    str: _words(_STRING_METHODS),
    dict: _words("copy get items keys values"),
    list: _words("copy count index"),
    tuple: _words("count index"),
    LoopContext: _words(_LOOP_ATTRIBUTES),
}
"""By the exact type of their owner. Not among them: what changes its owner, and what takes a width, which may
be any number (`format`, `center`, `zfill`, …)."""

SHALLOW_FILTERS: Final = _words(
    """
    count d default first items last length list map reject rejectattr reverse safe select selectattr
    """
)
"""These do not look into the items of what they are given."""

DEEP_FILTERS: Final = _words(
    """
    abs capitalize dictsort float indent int join lower max min replace round sort string sum title tojson
    trim unique upper
    """
)

PLAIN_TESTS: Final = _words(
    """
    boolean callable defined divisibleby even false float integer iterable lower mapping none number odd
    sameas sequence string true undefined upper
    """
)

COMPARING_TESTS: Final = _words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne")

NODES: Final = _words(
    """
    Add And Assign AssignBlock Break Call CallBlock Compare Concat CondExpr Const Continue Dict Div ExprStmt
    Filter FilterBlock FloorDiv For Getattr Getitem If Keyword List Macro Mod Mul NSRef Name Neg Not Operand
    Or Output Pair Pos Pow Slice Sub Template TemplateData Test Tuple With
    """
)
"""All of the language but what reaches other templates (include, import, extends, block) or settings."""
