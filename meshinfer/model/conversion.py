"""Turns what was fetched into an OpenVINO model: GGUF files, Hugging Face checkpoints, and weights of fewer
bits.

Each conversion runs in a process of its own, in a directory that gets its final name once all of it is there:
what bears that name is whole, and a pull that was interrupted does not convert again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meshinfer.errors import ModelError
from meshinfer.model import gguf, gguf_tokenizer, process, rope, space
from meshinfer.model.progress import Progress
from meshinfer.model.quantization import Compression
from meshinfer.model.sources import IR_FILE, weights_of
from meshinfer.model.textfiles import TextFiles, of_gguf
from meshinfer.model.tokenizer import Tokenizer

_EXTRA: Final = "install it with: python -m pip install 'meshinfer[convert]'"


def from_gguf(path: Path, work: Path, progress: Progress) -> tuple[Path, TextFiles]:
    """The .xml of the model in the GGUF file at `path`, and its texts. Raises `ModelError` saying why not."""
    try:
        header = gguf.read_header(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error})") from error
    gguf.check(header)
    texts = of_gguf(header)
    target = work / "converted"
    if not target.is_dir():
        _convert_gguf(path, header, texts, target, progress)
    return target / IR_FILE, texts


def _convert_gguf(
    path: Path, header: gguf.Header, texts: TextFiles, target: Path, progress: Progress
) -> None:
    size = path.stat().st_size
    frequencies = rope.frequencies(header, path)
    space.require(target.parent, 2 * size, f"converting {path.name}")
    partial = _emptied(target.with_suffix(".partial"))
    _share(path, partial / "model.gguf")
    samples = list(gguf_tokenizer.SAMPLES) if gguf_tokenizer.split_of(header).known else []

    def watch(_line: str = "") -> None:
        progress.update("converting", min(_size(partial / "openvino_model.bin"), size), size)

    watch()
    request = {"texts": samples, "unscaled": frequencies.unscaled, "wanted": frequencies.wanted}
    result = process.task(["gguf"], partial, json.dumps(request), watch)
    if not (partial / IR_FILE).is_file() or not weights_of(partial / IR_FILE).is_file():
        raise ModelError(f"the conversion of {path.name} wrote no model: check the disk and pull again")
    _compare(texts, samples, result.get("ids"))
    (partial / "model.gguf").unlink()
    partial.replace(target)
    progress.update("converting", size, size)


def _compare(texts: TextFiles, samples: Sequence[str], theirs: object) -> None:
    """Two independent readings of one vocabulary must agree, or one of them feeds the model wrong tokens."""
    if texts.tokenizer is None:
        return
    tokenizer = Tokenizer(texts.tokenizer, texts.eos, texts.bos)
    ours = [tokenizer.encode(sample) for sample in samples]
    if not isinstance(theirs, list) or len(theirs) != len(ours):
        raise ModelError("the conversion failed: it gave no tokens to compare")
    for sample, mine, other in zip(samples, ours, theirs, strict=True):
        if mine != other:
            raise ModelError(
                f"the GGUF file's vocabulary is read in two ways (for {sample[:20]!r}),"
                f" so that the model would be fed wrong tokens: {gguf.INSTEAD}"
            )


def from_checkpoint(directory: Path, work: Path, progress: Progress) -> Path:
    """The .xml of a Hugging Face checkpoint. Raises `ModelError`, naming what is to be installed."""
    require_optimum()
    target = work / "converted"
    if not target.is_dir():
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        space.require(work, 2 * size, f"converting {directory.name}")
        partial = _emptied(target.with_suffix(".partial"))
        # Only what cannot run code is shown to the converter: neither pickles nor modules.
        (partial / "checkpoint").mkdir()
        for file in sorted(directory.iterdir()):
            if file.is_file() and file.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model"):
                _share(file, partial / "checkpoint" / file.name)
        result = partial / "model"

        def watch(_line: str = "") -> None:
            progress.update("converting", min(process.size_of(result), size), size)

        watch()
        process.task(["checkpoint"], partial, watch=watch)
        if not (result / IR_FILE).is_file():
            raise ModelError(f"{directory.name} is no language model that can be converted")
        result.replace(target)
        shutil.rmtree(partial, ignore_errors=True)
        progress.update("converting", size, size)
    return target / IR_FILE


def require_optimum() -> None:
    """Raises `ModelError`, naming the command, where Hugging Face checkpoints cannot be converted here."""
    try:
        found = importlib.util.find_spec("optimum.intel") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ModelError(
            f"converting a Hugging Face checkpoint needs optimum-intel, which is not installed: {_EXTRA}"
        )


def require_nncf() -> None:
    """Raises `ModelError`, naming the command, where weights cannot be compressed here."""
    if importlib.util.find_spec("nncf") is None:
        raise ModelError(f"storing weights in fewer bits needs nncf, which is not installed: {_EXTRA}")


def compressed(xml: Path, compression: Compression, work: Path, progress: Progress) -> Path:
    """The .xml of the same model with its weights in fewer bits. Raises `ModelError`."""
    require_nncf()
    target = work / f"compressed-{compression}"
    if not target.is_dir():
        size = weights_of(xml).stat().st_size
        space.require(work, size, "storing the weights in fewer bits")
        partial = _emptied(target.with_suffix(".partial"))
        progress.update("compressing", 0, 0)
        process.task(
            ["compress", compression, str(xml.resolve())],
            partial,
            watch=lambda _line: progress.update("compressing", 0, 0),
        )
        partial.replace(target)
        progress.update("compressing", 1, 1)
    return target / IR_FILE


def _emptied(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _share(source: Path, target: Path) -> None:
    """A second name for the file, or a copy where the file system knows none or the file is another's."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
