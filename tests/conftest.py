"""What all tests share."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import settings
from mesh_processes import meshinfer

from meshinfer.net.loop import new_loop

# Scripts have parts that tests use, the simulated office among them.
sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

# A busy machine is no reason to fail: what has to be fast is measured where that is the matter.
settings.register_profile("meshinfer", deadline=None)
settings.load_profile("meshinfer")

_PURE = ("test_mesh_", "test_model_graph", "test_model_verify", "test_trust_", "test_wire_")
_NOT_PURE = ("test_mesh_life", "test_mesh_search")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Decisions and encodings need no process, no port and no clock: such tests run on all cores at once."""
    for item in items:
        if item.path.name.startswith(_PURE) and not item.path.name.startswith(_NOT_PURE):
            item.add_marker(pytest.mark.pure)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run in the kind of loop that an agent runs in: Windows's default one cannot watch ZeroMQ's sockets."""
    return {"agent": new_loop}


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with SmolLM2 in it, pulled as a person would; MESHINFER_TEST_STORE names one that is there already."""
    given = os.environ.get("MESHINFER_TEST_STORE")
    if given:
        return Path(given)
    home = tmp_path_factory.mktemp("pulled")
    meshinfer("pull", "smollm2", "--home", home)
    return home / "models"
