"""Proves that a peer which holds the skeleton alone, graph and small constants, gets the same graph as one
with all weights.

The paged-attention pass may compute constants from others. Were a small one computed from large weights, a
peer without these weights would compute it from zeros, and be silently wrong. So the pass is run once more
over empty weights, and must come to the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from meshinfer.errors import ModelError
from meshinfer.limits import SMALL_CONSTANT_BYTES
from meshinfer.model import graph_check
from meshinfer.model.graph import PagedGraph
from meshinfer.model.manifest import GRAPH, SMALL
from meshinfer.model.mapping import mapped_briefly
from meshinfer.model.sparse import create_sparse, disk_error
from meshinfer.model.weights import ModelFiles


def check_skeleton(files: ModelFiles, graph: PagedGraph) -> None:
    """Raises ModelError where `graph`, of all weights, is not what the skeleton in `files` gives."""
    xml, small = files.read_file(GRAPH), files.read_file(SMALL)
    assert xml is not None, "every manifest names a graph"
    assert small is not None, "every manifest names its small constants"
    try:
        with tempfile.TemporaryDirectory(dir=files.directory, prefix="skeleton-") as directory:
            path = Path(directory) / "weights.bin"
            _write(path, xml, small, files.manifest.weights_size)
            with mapped_briefly(path) as tensor:
                _compare(graph, PagedGraph(xml, tensor))
    except OSError as error:
        raise disk_error(error, f"verifying {files.name}") from error


def _write(path: Path, xml: bytes, small: bytes, size: int) -> None:
    create_sparse(path, size)
    taken = 0
    with path.open("r+b") as file:
        for offset, length in graph_check.small_ranges(graph_check.check(xml, size).constants):
            file.seek(offset)
            file.write(small[taken : taken + length])
            taken += length


def _compare(whole: PagedGraph, skeleton: PagedGraph) -> None:
    same = whole.topology == skeleton.topology and whole.cuts == skeleton.cuts
    if not same or not all(
        _equal(*pair) for pair in zip(whole.constant_nodes(), skeleton.constant_nodes(), strict=True)
    ):
        raise ModelError(
            "the model's graph depends on its large weights, so no PC could run a part of it without having "
            "them all"
        )


def _equal(one: Any, other: Any) -> bool:
    if one.get_byte_size() != other.get_byte_size() or one.get_element_type() != other.get_element_type():
        return False
    if one.get_byte_size() >= SMALL_CONSTANT_BYTES:
        return str(one.get_friendly_name()) == str(other.get_friendly_name())
    return bytes(one.data.tobytes()) == bytes(other.data.tobytes())
