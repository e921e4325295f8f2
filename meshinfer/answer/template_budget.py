"""What one rendering of a chat template may cost, counted in steps and characters: never in time, which would
make the same template work on one PC and fail on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from jinja2.utils import Namespace

from meshinfer import limits
from meshinfer.errors import ModelError

_CHARACTERS_PER_STEP: Final = 256
"""Copying or searching so many characters takes no longer than a step of Python. It also bounds memory: all
strings that one rendering makes have 26 million characters at most."""

_ITEMS_PER_STEP: Final = 16
_INTEGER_BITS: Final = 64


class TemplateLimit(ModelError):
    """A chat template asked for more than any honest one does."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the model's chat template {what}, as no honest one does: use another model")


class Budget:
    """Steps and characters of output that are left."""

    __slots__ = ("_characters", "_steps")

    def __init__(self) -> None:
        self._steps = limits.TEMPLATE_STEPS
        self._characters = limits.TEMPLATE_OUTPUT_CHARS

    def charge(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TemplateLimit(f"takes more than {limits.TEMPLATE_STEPS:,} steps")

    def size(self, value: object) -> None:
        """Charges for handling `value` once without looking into what it contains."""
        if isinstance(value, str):
            self.charge(1 + _check_length(value) // _CHARACTERS_PER_STEP)
        elif isinstance(value, list | tuple | dict | range):
            self.charge(1 + len(value) // _ITEMS_PER_STEP)
        else:
            self.charge()

    def weigh(self, value: object) -> None:
        """Charges for all that `value` contains, as often as it contains it.

        Lists that hold one list twice, nested, would else take exponential time to compare or print.
        """
        if isinstance(value, Namespace):
            return self.charge()
        stack = [value]
        while stack:
            item = stack.pop()
            self.size(item)
            match item:
                case Namespace():
                    raise TemplateLimit("puts a namespace into a list")
                case int() if item.bit_length() > _INTEGER_BITS:
                    raise TemplateLimit("computes with huge numbers")
                case dict():
                    self.charge(len(item))
                    stack.extend(item)
                    stack.extend(item.values())
                case list() | tuple():
                    self.charge(len(item))
                    stack.extend(item)
                case range():
                    self.charge(len(item))
                case _:
                    pass
        return None

    def show(self, value: object) -> str:
        """`value` as output."""
        text = value if isinstance(value, str) else self.text(value)
        self.size(text)
        self._characters -= len(text)
        if self._characters < 0:
            raise TemplateLimit(f"writes more than {limits.TEMPLATE_OUTPUT_CHARS:,} characters")
        return text

    def text(self, value: object) -> str:
        """`value` as a string. A namespace has none: it might contain itself."""
        if isinstance(value, Namespace):
            raise TemplateLimit("prints a namespace")
        self.weigh(value)
        return str(value)

    def concat(self, values: list[object]) -> str:
        texts = [self.text(value) for value in values]
        check_length(sum(map(len, texts)))
        return "".join(texts)

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """Charges for items as they are taken."""
        for value in values:
            self.charge()
            yield value


def check_length(characters: int) -> None:
    if characters > limits.TEMPLATE_OUTPUT_CHARS:
        raise TemplateLimit(f"makes a text of more than {limits.TEMPLATE_OUTPUT_CHARS:,} characters")


def _check_length(text: str) -> int:
    check_length(len(text))
    return len(text)


current: ContextVar[Budget] = ContextVar("budget")
"""The budget of the rendering that runs in this thread or task."""


def spending(budget: Budget, call: Callable[[], str]) -> str:
    token = current.set(budget)
    try:
        return call()
    finally:
        current.reset(token)
