"""What lies damaged on a disk is told to the person whose disk it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshinfer.agent.bulk import Bulk
from meshinfer.agent.library import STORE_DIRECTORY, Library


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "manifest.json"),
        ({"manifest.json": b""}, "damaged"),
        ({"manifest.json": b"\xff{]"}, "damaged"),
        ({"manifest.json": b"[]"}, "manifest"),
        ({"manifest.json": b"{}", "weights.bin": b"x"}, "manifest"),
    ],
)
async def test_a_damaged_model_is_a_problem_and_not_just_no_model(
    tmp_path: Path, files: dict[str, bytes], told: str
) -> None:
    directory = tmp_path / STORE_DIRECTORY / ("c" * 64)
    directory.mkdir(parents=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    library = Library(tmp_path, Bulk(lambda _peer, _message: False, lambda _model: None))
    await library.refresh()
    (problem,) = library.problems()
    assert problem.startswith("model cccccccccccc: ")
    assert told in problem
    assert library.holdings() == ()
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    await library.refresh()
    assert library.problems() == [], "what was removed is no problem any more"
