"""A setting means what file, variable or option say; a slip is named with its place and a hint."""

from __future__ import annotations

import contextlib
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.agent import config, settings
from meshinfer.agent.config import SETTINGS, Config, Split
from meshinfer.agent.settings import Address
from meshinfer.errors import ConfigError
from meshinfer.limits import DOOR_PORT, GIB, MIB
from meshinfer.values import Objective, Precision

ROOT = Path(__file__).parent.parent


def load(home: Path, text: str = "", **rest: object) -> Config:
    (home / "config.toml").write_text(text, encoding="utf-8")
    return config.load(home, environment={}, **rest)  # type: ignore[arg-type]


def test_every_key_has_a_sound_default(tmp_path: Path) -> None:
    loaded = config.load(tmp_path, environment={})
    assert loaded.name
    assert loaded.network.peers == ()
    assert loaded.network.interfaces == ()
    assert loaded.network.port == DOOR_PORT
    assert loaded.sharing.memory_bytes == config.default_memory_bytes() > 0
    assert loaded.engine.precision is Precision.AUTO
    assert (loaded.engine.device, loaded.engine.threads) == ("auto", None)
    assert loaded.model.default == "smollm2"
    assert loaded.placement.split is Split.AUTO
    assert loaded.placement.objective is Objective.LATENCY
    assert loaded.mesh.token is None


def test_the_file_is_read(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
        name = "Büro 3"
        [network]
        peers = ["10.0.0.5:7000", "[fe80::1]:7001", "host.example"]
        interfaces = ["eth0", "127.0.0.1"]
        port = 0
        [sharing]
        memory = "1.5 GiB"
        [engine]
        precision = "exact"
        device = "gpu.1"
        threads = 4
        [model]
        default = "big"
        [placement]
        split = "always"
        objective = "throughput"
        [mesh]
        token = "meshinfer1-abc"
        """,
    )
    assert loaded.name == "Büro 3"
    assert loaded.network.peers == (
        Address("10.0.0.5", 7000),
        Address("fe80::1", 7001),
        Address("host.example", DOOR_PORT),
    )
    assert loaded.network.interfaces == ("eth0", "127.0.0.1")
    assert loaded.network.port == 0
    assert loaded.sharing.memory_bytes == 3 * GIB // 2
    assert loaded.engine.precision is Precision.EXACT
    assert (loaded.engine.device, loaded.engine.threads) == ("GPU.1", 4)
    assert loaded.model.default == "big"
    assert loaded.placement.split is Split.ALWAYS
    assert loaded.placement.objective is Objective.THROUGHPUT
    assert loaded.mesh.token == "meshinfer1-abc"


def test_the_token_does_not_show(tmp_path: Path) -> None:
    assert "geheim" not in repr(load(tmp_path, '[mesh]\ntoken = "geheim"'))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, '[mesh]\ntoken = ["geheim"]')
    assert "geheim" not in str(caught.value)


def test_option_over_environment_over_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "file"\n[network]\nport = 1\npeers = ["a"]\n')
    environment = {
        "MESHINFER_NAME": "environment",
        "MESHINFER_NETWORK_PORT": "2",
        "MESHINFER_NETWORK_PEERS": "b:1, c:2",
        "MESHINFER_ENGINE_THREADS": " ",
    }
    loaded = config.load(tmp_path, environment, {"name": "option", "network.peers": (), "network.port": None})
    assert loaded.name == "option"
    assert loaded.network.port == 2
    assert loaded.network.peers == (Address("b", 1), Address("c", 2))
    assert loaded.engine.threads is None


def test_each_key_has_its_variable(tmp_path: Path) -> None:
    given = {
        "name": "n",
        "network.peers": "p:1",
        "network.interfaces": "lo",
        "network.port": "5",
        "network.discovery": "off",
        "sharing.memory": "1 GiB",
        "sharing.ask": "no",
        "sharing.lend": "no",
        "engine.precision": "exact",
        "engine.device": "CPU",
        "engine.threads": "2",
        "model.default": "m",
        "placement.split": "always",
        "placement.objective": "throughput",
        "mesh.token": "t",
    }
    assert given.keys() == {setting.key for setting in SETTINGS}
    environment = {"MESHINFER_" + key.upper().replace(".", "_"): value for key, value in given.items()}
    loaded = config.load(tmp_path, environment)
    defaults = config.load(tmp_path, {})
    for section in ("name", "network", "sharing", "engine", "model", "placement", "mesh"):
        assert getattr(loaded, section) != getattr(defaults, section)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[network]\n\nprot = 5", ["[network] prot", "line 3", "did you mean [network] port?"]),
        ("[netwrok]\nport = 5", ["[netwrok]", "line 1", "did you mean [network]?"]),
        ("port = 5", ["port", "line 1", "did you mean [network] port?"]),
        ("nmae = 'x'", ["line 1", "did you mean name?"]),
        ("network.prot = 5", ["line 1", "[network] port"]),
        ("[engine]\nfoo = 1", ["known here: device, precision, threads"]),
        ("[whatever]\nfoo = 1", ["known: [engine]", "[sharing]"]),
        ("network = 5", ["line 1", "write [network]"]),
        ("[network]\nport = 70000", ["[network] port", "line 2", "70000", "65535"]),
        ("[network]\nport = true", ["[network] port"]),
        ("[network]\npeers = ['10.0.0.256']", ["peers", "10.0.0.256", "host:port"]),
        ("[network]\npeers = [5]", ["peers", "list"]),
        ("[network]\npeers = ['a:b:c:x:y']", ["peers"]),
        ("[network]\npeers = ['http://a:1']", ["peers", "host:port"]),
        ("[network]\npeers = ['a:0']", ["port outside"]),
        ("[sharing]\nmemory = '2 gigs'", ["[sharing] memory", "2 GiB"]),
        ("[sharing]\nmemory = -1", ["[sharing] memory"]),
        ("[sharing]\nmemory = 1.5", ["[sharing] memory"]),
        ("[sharing]\nmemory = '9999999 TiB'", ["more than any PC has"]),
        ("[engine]\nprecision = 'fp8'", ["fp8", '"auto"', '"exact"']),
        ("[engine]\ndevice = 'TPU'", ["TPU", '"GPU.1"']),
        ("[engine]\nthreads = -1", ["threads"]),
        ("[placement]\nsplit = true", ["split", '"always"']),
        ("[placement]\nobjective = 'speed'", ["objective", '"latency"', '"throughput"']),
        ("name = ''", ["name"]),
        ('name = "a\\u0007"', ["printable"]),
        (f"name = '{'x' * 65}'", ["64"]),
        ("[model]\ndefault = 5", ["default"]),
        ("name = ", ["not valid TOML"]),
        ("name = 1 2", ["not valid TOML", "line 1"]),
        ("name = 'a'\nname = 'b'", ["not valid TOML"]),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "config.toml" in message
    for part in parts:
        assert part in message


def test_a_mistake_outside_the_file_names_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MESHINFER_NETWORK_PORT"):
        config.load(tmp_path, {"MESHINFER_NETWORK_PORT": "x"})
    with pytest.raises(ConfigError, match="did you mean MESHINFER_NETWORK_PEERS"):
        config.load(tmp_path, {"MESHINFER_NETWORK_PEER": "x"})
    with pytest.raises(ConfigError, match="option --memory"):
        config.load(tmp_path, {}, {"sharing.memory": "lots"})
    config.load(tmp_path, {"MESHINFER_SOMEBODY_ELSES": "x", "MESHINFER_HOME": "y"})


def test_files_of_windows_editors_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes("\ufeffname = 'Büro'\r\n[network]\r\nport = 5\r\n".encode())
    assert config.load(tmp_path, {}).name == "Büro"
    (tmp_path / "config.toml").write_bytes(b"[network]\nport = 5\nname = '\xfc'")
    with pytest.raises(ConfigError, match=r"line 3: not UTF-8"):
        config.load(tmp_path, {})


def test_a_huge_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"#" * (1 * MIB + 1))
    with pytest.raises(ConfigError, match="larger"):
        config.load(tmp_path, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (5, 5),
        ("2 GiB", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("0.5 MiB", MIB // 2),
        ("1.1 KB", 1100),
        ("800 MB", 800_000_000),
        ("1 TB", 10**12),
        ("12 B", 12),
    ],
)
def test_amounts_of_memory(text: object, size: int) -> None:
    assert settings.memory_bytes(text) == size


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.text()), st.none()))
def test_any_value_is_taken_or_refused_in_words(value: object) -> None:
    for setting in SETTINGS:
        with contextlib.suppress(ValueError):
            setting.parse(value)


@given(st.text())
def test_any_text_is_a_configuration_or_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    home = tmp_path_factory.getbasetemp()
    (home / "config.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        config.load(home, {})


@given(st.integers(min_value=0, max_value=2**45))
def test_memory_in_bytes_is_exact(size: int) -> None:
    assert settings.memory_bytes(size) == settings.memory_bytes(f"{size} B") == size


@pytest.mark.parametrize("name", ["home", "office", "lab"])
def test_the_examples_are_valid_and_so_is_all_that_they_comment_out(tmp_path: Path, name: str) -> None:
    text = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    load(tmp_path, text)
    # A commented setting looks like "#key = value"; prose has a blank after the sign.
    uncommented = re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)
    load(tmp_path, uncommented)
    assert len(list(config._flatten(tomllib.loads(uncommented), tmp_path, ""))) >= 3


def test_home(tmp_path: Path) -> None:
    assert config.default_home({"MESHINFER_HOME": str(tmp_path)}) == tmp_path
    assert config.default_home({}).name == "meshinfer"
