"""What a person or their IT may set: `config.toml`, environment and options become one frozen `Config`.

Every setting stands once, in `SETTINGS`. Each has a default, a key in the file (`[network] port`), an
environment variable (`MESHINFER_NETWORK_PORT`) and, where a person would want it, an option (`--port`).
An option wins over the environment, which wins over the file, which wins over the default.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from meshinfer.agent import settings
from meshinfer.agent.settings import Address
from meshinfer.errors import ConfigError
from meshinfer.limits import CONFIG_BYTES, DOOR_PORT, GIB
from meshinfer.values import Objective, Precision

CONFIG_FILE: Final = "config.toml"
_PREFIX: Final = "MESHINFER_"


class Split(StrEnum):
    """`AUTO` leaves a model whole where one peer can hold it; `ALWAYS` spreads it over all that have room."""

    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """`interfaces` holds names or addresses, none meaning all usable ones; `port` 0 means any free one. With
    `discovery` off nothing is announced or listened for by multicast: peers are those configured, and theirs."""

    peers: tuple[Address, ...]
    interfaces: tuple[str, ...]
    port: int
    discovery: bool


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """`memory_bytes` bounds weights, KV and buffers together. With `ask` off this PC only lends: nobody asks here, so
    no room is kept for the embedding and the head, which whoever asks needs. With `lend` off it only asks."""

    memory_bytes: int
    ask: bool
    lend: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`device` is "auto" or OpenVINO's name, such as "GPU.1"; `threads` None leaves it to OpenVINO."""

    precision: Precision
    device: str
    threads: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    default: str


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """`objective` is what this PC would have plans be best at; the mesh goes by what most of its agents say."""

    split: Split
    objective: Objective


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """`token` joins a mesh at start; it is a secret, so `repr` leaves it out."""

    token: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Config:
    name: str
    network: NetworkConfig
    sharing: SharingConfig
    engine: EngineConfig
    model: ModelConfig
    placement: PlacementConfig
    mesh: MeshConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that may be set.

    `parse` takes the value as TOML or a string gave it, and raises ValueError saying what is allowed.
    """

    key: str
    parse: Callable[[Any], Any]
    default: Callable[[], Any]
    option: str | None = None

    @property
    def variable(self) -> str:
        return _PREFIX + self.key.upper().replace(".", "_")

    @property
    def label(self) -> str:
        section, _, name = self.key.rpartition(".")
        return f"[{section}] {name}" if section else name


def _default_name() -> str:
    try:
        return settings.name(platform.node())
    except ValueError:
        return "unnamed"


def default_memory_bytes() -> int:
    """Half of the PC's memory; on a small PC less, down to a quarter, so that 4 GiB stay with the person."""
    import psutil

    total = int(psutil.virtual_memory().total)
    return min(total // 2, max(total - 4 * GIB, total // 4))


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("name", settings.name, _default_name, "--name"),
    Setting("network.peers", settings.addresses, tuple, "--peer"),
    Setting("network.interfaces", settings.words, tuple, "--interface"),
    Setting("network.port", settings.port, lambda: DOOR_PORT, "--port"),
    Setting("network.discovery", settings.switch, lambda: True, "--no-discovery"),
    Setting("sharing.memory", settings.memory_bytes, default_memory_bytes, "--memory"),
    Setting("sharing.ask", settings.switch, lambda: True, "--lend-only"),
    Setting("sharing.lend", settings.switch, lambda: True, "--ask-only"),
    Setting("engine.precision", settings.choice(Precision), lambda: Precision.AUTO, "--precision"),
    Setting("engine.device", settings.device, lambda: "auto", "--device"),
    Setting("engine.threads", settings.threads, lambda: None, "--threads"),
    Setting("model.default", settings.text, lambda: "smollm2", "--model"),
    Setting("placement.split", settings.choice(Split), lambda: Split.AUTO, "--split"),
    Setting("placement.objective", settings.choice(Objective), lambda: Objective.LATENCY),
    Setting("mesh.token", settings.secret, lambda: None),
)
_BY_KEY: Final = {setting.key: setting for setting in SETTINGS}
_SECTIONS: Final = sorted({setting.key.split(".")[0] for setting in SETTINGS if "." in setting.key})


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it came, and where it stands, in words for a person."""

    value: object
    where: str


def default_home(environment: Mapping[str, str] | None = None) -> Path:
    """`MESHINFER_HOME`, or the place where this system keeps a person's application data."""
    given = (os.environ if environment is None else environment).get("MESHINFER_HOME", "")
    if given.strip():
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("meshinfer", appauthor=False))


def load(
    home: Path,
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> Config:
    """Reads `home`/config.toml (it may be missing), then applies environment variables and options.

    `options` maps keys such as "network.port" to values; one that is None or an empty tuple was not given.
    Raises ConfigError, naming key, place and what is allowed.
    """
    given = _from_file(home / CONFIG_FILE)
    given |= _from_environment(os.environ if environment is None else environment)
    given |= _from_options(options or {})
    values = {setting.key: _value(setting, given.get(setting.key)) for setting in SETTINGS}
    return Config(
        name=values["name"],
        network=NetworkConfig(
            peers=values["network.peers"],
            interfaces=values["network.interfaces"],
            port=values["network.port"],
            discovery=values["network.discovery"],
        ),
        sharing=SharingConfig(
            memory_bytes=values["sharing.memory"], ask=values["sharing.ask"], lend=values["sharing.lend"]
        ),
        engine=EngineConfig(
            precision=values["engine.precision"],
            device=values["engine.device"],
            threads=values["engine.threads"],
        ),
        model=ModelConfig(default=values["model.default"]),
        placement=PlacementConfig(split=values["placement.split"], objective=values["placement.objective"]),
        mesh=MeshConfig(token=values["mesh.token"]),
    )


def _value(setting: Setting, given: _Given | None) -> Any:
    if given is None:
        return setting.default()
    try:
        return setting.parse(given.value)
    except ValueError as error:
        raise ConfigError(f"{setting.label} ({given.where}): {error}") from None


# ── the file ────────────────────────────────────────────────────────────────────────────────────────


def _from_file(path: Path) -> dict[str, _Given]:
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    given: dict[str, _Given] = {}
    for key, value in _flatten(document, path, text):
        if key not in _BY_KEY:
            raise ConfigError(_unknown_key(key, _where(path, text, key)))
        given[key] = _Given(value, _where(path, text, key))
    return given


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {CONFIG_BYTES // 1024} KiB: this is no configuration file")
    try:
        # The editors of Windows begin a UTF-8 file with a byte order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None
    # The parser forgives no carriage return but before a newline; old editors end lines with it alone.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _flatten(document: Mapping[str, object], path: Path, text: str) -> Iterator[tuple[str, object]]:
    for name, value in document.items():
        if isinstance(value, dict):
            if name not in _SECTIONS:
                raise ConfigError(_unknown_section(name, _where(path, text, name + ".")))
            yield from ((f"{name}.{inner}", content) for inner, content in value.items())
        elif name in _SECTIONS:
            raise ConfigError(f"{name} ({_where(path, text, name)}) is a section: write [{name}] on a line")
        else:
            yield name, value


def _where(path: Path, text: str, key: str) -> str:
    line = _line_of(text, key)
    return f"{path}, line {line}" if line else str(path)


def _line_of(text: str, key: str) -> int | None:
    """Line of `key` ("network.port"; "network." for the section), as far as a look at each line tells."""
    section, _, name = key.rpartition(".")
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*\"?([^\]\"]+?)\"?\s*\]", line):
            here = header[1]
            if not name and here == section:
                return number
        elif assignment := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            found = re.sub(r"[\"' ]", "", assignment[1])
            if name and (f"{here}.{found}" if here else found) == key:
                return number
    return None


# ── environment and options ─────────────────────────────────────────────────────────────────────────


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    """A variable of this prefix may belong to others, but one that is nearly a setting is a slip."""
    by_variable = {setting.variable: setting for setting in SETTINGS}
    given: dict[str, _Given] = {}
    for variable, value in environment.items():
        if variable in by_variable:
            if value.strip():
                given[by_variable[variable].key] = _Given(value, f"environment variable {variable}")
        elif variable.startswith(_PREFIX) and variable != "MESHINFER_HOME":
            near = difflib.get_close_matches(variable, by_variable, n=1, cutoff=0.85)
            if near:
                raise ConfigError(
                    f"environment variable {variable} is not a setting; did you mean {near[0]}?"
                )
    return given


def _from_options(options: Mapping[str, object]) -> dict[str, _Given]:
    given = {}
    for key, value in options.items():
        if value is not None and value != ():
            given[key] = _Given(value, f"option {_BY_KEY[key].option or key}")
    return given


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────────


def _unknown_key(key: str, where: str) -> str:
    section, _, name = key.rpartition(".")
    known = [setting for setting in SETTINGS if setting.key.rpartition(".")[0] == section]
    label = f"[{section}] {name}" if section else name
    return f"{label} ({where}) is not a setting; {_suggestion(key, name, known)}"


def _suggestion(key: str, name: str, known: list[Setting]) -> str:
    """The nearest name in the same section first, then one of that name in another section."""
    names = {setting.key.rpartition(".")[2]: setting for setting in known}
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {names[near[0]].label}?"
    for setting in SETTINGS:
        if setting.key.rpartition(".")[2] == name:
            return f"did you mean {setting.label}?"
    if near := difflib.get_close_matches(key, _BY_KEY, n=1, cutoff=0.75):
        return f"did you mean {_BY_KEY[near[0]].label}?"
    return "known here: " + ", ".join(sorted(names))


def _unknown_section(name: str, where: str) -> str:
    near = difflib.get_close_matches(name, _SECTIONS, n=1)
    hint = (
        f"did you mean [{near[0]}]?"
        if near
        else "known: " + ", ".join(f"[{section}]" for section in _SECTIONS)
    )
    return f"[{name}] ({where}) is not a section; {hint}"
