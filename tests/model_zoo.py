"""The small models in tests/data/zoo as the store would hold them, for the tests of the model room."""

from __future__ import annotations

import functools
from pathlib import Path

from meshinfer.model import build, textfiles
from meshinfer.model.manifest import Manifest
from meshinfer.model.progress import Silent
from meshinfer.model.textfiles import TextFiles
from meshinfer.model.weights import ModelFiles

ZOO = Path(__file__).parent / "data" / "zoo"
NAMES = sorted(path.name for path in ZOO.iterdir() if path.is_dir())

NO_TEXTS = TextFiles(tokenizer=None, template=None, eos=(), bos=None, context=512)


def xml_of(name: str) -> Path:
    return ZOO / name / "openvino_model.xml"


def weights_of(name: str) -> Path:
    return ZOO / name / "openvino_model.bin"


@functools.cache
def manifest_of(name: str) -> Manifest:
    texts = textfiles.of_directory(ZOO / name)
    return build.build_manifest(xml_of(name), weights_of(name), texts, Silent())


def adopted(name: str, store: Path) -> ModelFiles:
    """The whole model, in `store`."""
    texts = textfiles.of_directory(ZOO / name)
    return build.adopt(store, manifest_of(name), name, xml_of(name), weights_of(name), texts, Silent())


def empty(name: str, store: Path) -> ModelFiles:
    """A directory as a peer has it that knows the manifest and nothing else."""
    return ModelFiles.create(store, manifest_of(name).to_bytes(), name)


def changed(
    name: str, directory: Path, xml: bytes | None = None, weights: bytes | None = None
) -> tuple[Path, Path]:
    """A copy of a model's files with other bytes in one of them: its graph and its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    graph, numbers = directory / "openvino_model.xml", directory / "openvino_model.bin"
    graph.write_bytes(xml_of(name).read_bytes() if xml is None else xml)
    numbers.write_bytes(weights_of(name).read_bytes() if weights is None else weights)
    return graph, numbers
