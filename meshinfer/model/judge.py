"""Tries a model that was just pulled, in a process of its own: `python -m meshinfer.model.judge DIRECTORY`.

What OpenVINO makes of a graph that nobody tried may crash, and weights that were mapped once stay mapped
while a process lives (`mapping`), so that on Windows their directory could not be moved into the store.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshinfer.errors import ModelError
from meshinfer.model import process
from meshinfer.model.convert import FAILURE
from meshinfer.model.progress import Progress


def judge(directory: Path, work: Path, progress: Progress) -> str:
    """Runs the quick form of `verify` over the model in `directory`: "", or why it would answer wrongly.

    Raises `ModelError` where it could not be tried.
    """

    def watch(line: str) -> None:
        done, _, total = line.partition("/")
        if done.isdecimal() and total.isdecimal():
            progress.update("verifying", int(done), int(total))

    report = process.module(__name__, [str(directory)], work, watch)
    return str(report.get("reason", "the trial ended without a word"))


class _Printed:
    def update(self, stage: str, done: int, total: int) -> None:
        print(f"{done}/{total}", flush=True)  # noqa: T201


def main(directory: str) -> int:
    from meshinfer.model.verify import verify
    from meshinfer.model.weights import ModelFiles

    try:
        report = verify(ModelFiles(Path(directory)), _Printed(), quick=True)
    except ModelError as error:
        print(FAILURE + str(error), file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps({"reason": report.reason}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
