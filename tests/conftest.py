"""What all tests share."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from mesh_processes import meshinfer


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The kind of loop that an agent runs in (`net.loop`): Windows's default one cannot watch ZeroMQ's sockets."""
    if sys.platform == "win32":
        return asyncio.WindowsSelectorEventLoopPolicy()
    return asyncio.DefaultEventLoopPolicy()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with SmolLM2 in it, pulled as a person would; MESHINFER_TEST_STORE names one that is there already."""
    given = os.environ.get("MESHINFER_TEST_STORE")
    if given:
        return Path(given)
    home = tmp_path_factory.mktemp("pulled")
    meshinfer("pull", "smollm2", "--home", home)
    return home / "models"
