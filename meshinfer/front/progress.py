"""How far a long work is: bars on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from meshinfer.front.render import amount
from meshinfer.limits import KIB

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from meshinfer.model.progress import Progress

LINE_EVERY_S: Final = 5.0
_FEWEST_BYTES: Final = 64 * KIB


@contextmanager
def shown(*, quiet: bool = False) -> Iterator[Progress]:
    """Progress on standard error, in the form that fits what is there. `quiet` shows nothing."""
    if quiet:
        from meshinfer.model.progress import Silent

        yield Silent()
    elif sys.stderr.isatty():
        with _bars() as progress:
            yield Bars(progress)
    else:
        yield Lines()


def _bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    figures = TextColumn("{task.fields[figures]}")
    columns = (TextColumn("{task.description}"), BarColumn(), figures, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def figures(done: int, total: int) -> str:
    """Bytes as such; what are so few that they can be no bytes are counted."""
    if not total:
        return amount(done)
    return f"{done} of {total}" if total < _FEWEST_BYTES else f"{amount(done)} of {amount(total)}"


class Bars:
    """One bar for each stage; a stage is done when the next begins, or the block ends."""

    def __init__(self, progress: RichProgress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=None, figures="")
        task = self._tasks[stage]
        self._progress.update(task, completed=done, total=total or None, figures=figures(done, total))


class Lines:
    """For a log or another program: a line when a stage begins, and every few seconds while it lasts."""

    def __init__(self) -> None:
        self._stage = ""
        self._next_s = 0.0

    def update(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if stage == self._stage and now_s < self._next_s:
            return
        begins = stage != self._stage
        self._stage, self._next_s = stage, now_s + LINE_EVERY_S
        click.echo(stage if begins else f"{stage}: {figures(done, total)}", err=True)
