"""Whatever a person names and whatever a file holds: a model, or one sentence that says what to do."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as writer
import numpy as np
import pytest
import tiny_gguf
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import ModelError
from meshinfer.model import conversion, gguf, process, rope, sources, space, store, textfiles
from meshinfer.model.lock import exclusive
from meshinfer.values import ModelId

YARN = writer.RopeScalingType.YARN


class Silent:
    def update(self, stage: str, done: int, total: int) -> None: ...


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "wanted",
    [
        "", ".", "..", "/", "../../etc/passwd", "/dev/zero", "CON", "NUL", "aux.gguf", "C:\\models\\x",
        "a" * 300, "x/" * 2000, "nul\0byte", "~nobody-here/model", "modèle", "模型", "smollm3", "\x1b[31mred",
        "hf:", "hf:one", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a/b@../../c", "hf:a/b\n", "hf:https://x/y",
        "hf:a/../b.gguf",
    ],
)  # fmt: skip
def test_a_name_of_nothing_is_refused_in_one_printable_sentence(
    wanted: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        sources.recognise(wanted)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@given(st.text(max_size=300))
def test_no_name_does_anything_but_be_understood_or_refused(wanted: str) -> None:
    with contextlib.suppress(ModelError):
        sources.recognise(wanted)


def test_a_near_miss_is_told() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2\?"):
        sources.recognise("smolm2")


@pytest.mark.parametrize(
    ("wanted", "repository", "revision", "file", "name"),
    [
        ("hf:OpenVINO/Qwen3-8B-int4-ov", "OpenVINO/Qwen3-8B-int4-ov", None, None, "Qwen3-8B-int4-ov"),
        ("hf:a/b@main", "a/b", "main", None, "b"),
        ("hf:a/b@refs/pr/1", "a/b", "refs/pr/1", None, "b"),
        ("hf:a/b-GGUF/b.Q4_0.gguf@v1", "a/b-GGUF", "v1", "b.Q4_0.gguf", "b.Q4_0"),
    ],
)
def test_hub_names(wanted: str, repository: str, revision: str | None, file: str | None, name: str) -> None:
    assert sources.recognise(wanted) == sources.Hub(name, repository, revision, file)


def test_what_a_path_holds_is_found_by_its_files(tmp_path: Path) -> None:
    ir = _touch(tmp_path / "Mödel 漢", "openvino_model.xml", "openvino_model.bin")
    assert sources.recognise(str(ir)) == sources.Ir("Mödel 漢", ir / "openvino_model.xml")
    assert sources.recognise(str(ir / "openvino_model.xml")) == sources.recognise(str(ir))
    one = _touch(tmp_path / "one", "x.gguf")
    assert sources.recognise(str(one)) == sources.Gguf("x", one / "x.gguf")
    assert sources.recognise(str(one / "x.gguf")) == sources.Gguf("x", one / "x.gguf")
    checkpoint = _touch(tmp_path / "checkpoint", "config.json", "model.safetensors")
    assert sources.recognise(str(checkpoint)) == sources.Checkpoint("checkpoint", checkpoint)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "holds no model"),
        (["a.gguf", "b.gguf"], "several GGUF files"),
        (["config.json", "pytorch_model.bin"], "pickle"),
        (["openvino_model.xml"], "openvino_model.bin is missing"),
    ],
)
def test_a_directory_that_cannot_be_pulled_says_why(names: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        sources.recognise(str(_touch(tmp_path / "dir", *names)))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a"):
        sources.recognise(str(_touch(tmp_path, "model.pt") / "model.pt"))


def _touch(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"")
    return directory.resolve()


# ── GGUF: reading ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_header_says_what_the_writer_wrote(tiny: Path) -> None:
    header = gguf.read_header(tiny)
    reader = writer.GGUFReader(tiny)
    assert header.architecture == "llama"
    assert header.quantization == "F16"
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in reader.tensors]
    for mine, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert mine.offset == theirs.data_offset
        assert mine.size_bytes == theirs.n_bytes
        assert list(mine.shape) == list(theirs.shape)
    gguf.check(header)


def test_types_have_the_sizes_that_the_format_gives_them() -> None:
    for number, (name, block, size) in gguf.TENSOR_TYPES.items():
        assert Kind(number).name == name
        assert writer.GGML_QUANT_SIZES[Kind(number)] == (block, size)


def read(data: bytes, tmp_path: Path) -> gguf.Header:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return gguf.read_header(path)


def test_every_shortened_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    for length in [*range(0, 400), *range(400, len(data), 997), len(data) - 40]:
        with pytest.raises(ModelError):
            read(data[:length], tmp_path)


def test_whatever_is_changed_in_a_file_it_is_read_or_refused_and_never_more(
    tiny: Path, tmp_path: Path
) -> None:
    data = tiny.read_bytes()
    header_end = gguf.read_header(tiny).tensors[0].offset
    chance = random.Random(7)
    refused = 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(header_end)
            value = chance.choice(
                (b"\xff" * 8, b"\0" * 8, bytes([chance.randrange(256)]), b"\xff" * 4, b"\x01" * 8)
            )
            changed[at : at + len(value)] = value
        try:
            header = read(bytes(changed[: len(data)]), tmp_path)
            gguf.check(header)
            textfiles.of_gguf(header)
        except ModelError:
            refused += 1
    assert refused > 500


@given(st.binary(max_size=400))
def test_random_bytes_after_an_honest_beginning_are_refused(rest: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory, pytest.raises(ModelError):
        read(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + rest, Path(directory))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "just 0 bytes"),
        (b"PK\x03\x04" + b"\0" * 40, "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + b"\0" * 40, "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 40, "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + b"\0" * 40, "announces"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40) + b"\0" * 40, "announces"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"\0" * 40, "does not end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62), "entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<II", 77, 0), "unknown type 77"),
    ],
)
def test_lies_in_a_header_are_named(data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        read(data, tmp_path)


# ── GGUF: judging ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q5_0, Kind.Q5_1])
def test_a_tensor_type_that_cannot_be_converted_is_named(kind: Kind, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", kind=kind)
    with pytest.raises(ModelError, match=f"token_embd.weight as {kind.name}, which cannot be converted"):
        conversion.from_gguf(path, tmp_path, Silent())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
def test_a_tensor_type_that_can_be_converted_passes(kind: Kind, tmp_path: Path) -> None:
    gguf.check(gguf.read_header(tiny_gguf.write(tmp_path / "x.gguf", kind=kind, hidden=256, inner=256)))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(8, np.float32)), "would leave out"),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_exps.weight", np.ones((2, 32), np.float16)),
            "would leave out",
        ),
        (
            lambda w: w.add_tensor("blk.2.attn_norm.weight", np.ones(64, np.float32)),
            "2 layers and holds more",
        ),
        (
            lambda w: (w.add_rope_scaling_type(writer.RopeScalingType.YARN), w.add_rope_scaling_factor(4.0)),
            "scales",
        ),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count apart"),
        (lambda w: w.add_value_length(32), "attention.value_length apart"),
        (lambda w: w.add_uint16("split.count", 3), "one of several parts"),
    ],
)
def test_what_the_converter_would_leave_out_in_silence_is_refused(
    extra: Callable[[writer.GGUFWriter], None], reason: str, tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", extra=extra)
    with pytest.raises(ModelError, match=reason):
        gguf.check(gguf.read_header(path))


@pytest.mark.parametrize("factors", [[], [1.0] * 7, [0.0] * 8, [-1.0] * 8, [float("nan")] * 8])
def test_position_factors_that_make_no_sense_are_refused(factors: list[float], tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf")
    header = gguf.read_header(path)
    data = np.array(factors, np.float32).tobytes()
    end = path.stat().st_size
    with path.open("ab") as file:
        file.write(data)
    tensor = gguf.Tensor(rope.TENSOR, (len(factors),), "F32", end, len(data))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is damaged"):
        rope.frequencies(gguf.Header(header.metadata, (*header.tensors, tensor)), path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", 4),
        ("attention.head_count_kv", 1),
        ("attention.head_count", 8),
        ("embedding_length", 32),
        ("embedding_length", 128),
        ("feed_forward_length", 64),
    ],
)
def test_metadata_that_mean_another_model_than_the_weights_are_refused(
    tiny: Path, key: str, value: int
) -> None:
    header = gguf.read_header(tiny)
    with pytest.raises(ModelError, match="where its metadata mean"):
        gguf.check(gguf.Header({**header.metadata, f"llama.{key}": value}, header.tensors))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", architecture="mamba")
    with pytest.raises(
        ModelError, match="architecture 'mamba' cannot be converted, only llama, qwen2, qwen3"
    ):
        gguf.check(gguf.read_header(path))


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    header = gguf.read_header(tiny)
    kept = tuple(tensor for tensor in header.tensors if tensor.name != "blk.1.ffn_down.weight")
    lacking = gguf.Header(header.metadata, kept)
    with pytest.raises(ModelError, match=r"lacks blk\.1\.ffn_down\.weight"):
        gguf.check(lacking)


# ── what a directory says about text ────────────────────────────────────────────────────────────────────────


def test_ends_of_answers_are_gathered_from_all_files(tmp_path: Path) -> None:
    _write(tmp_path / "config.json", {"eos_token_id": 7, "bos_token_id": 1, "max_position_embeddings": 4096})
    _write(tmp_path / "generation_config.json", {"eos_token_id": [7, 9]})
    texts = textfiles.of_directory(tmp_path)
    assert texts.eos == (7, 9)
    assert texts.bos == 1
    assert texts.context == 4096
    assert texts.tokenizer is None
    assert texts.template is None


@pytest.mark.parametrize(
    ("name", "content", "template"),
    [
        ("chat_template.jinja", "{{ a }}", b"{{ a }}"),
        ("tokenizer_config.json", {"chat_template": "{{ b }}"}, b"{{ b }}"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": "{{ c }}"}]},
            b"{{ c }}",
        ),
        ("chat_template.json", {"chat_template": "{{ d }}"}, b"{{ d }}"),
        ("tokenizer_config.json", {"chat_template": 5}, None),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag"}]}, None),
    ],
)
def test_a_template_is_found_wherever_it_stands(
    name: str, content: Any, template: bytes | None, tmp_path: Path
) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content, encoding="utf-8")
    else:
        _write(tmp_path / name, content)
    assert textfiles.of_directory(tmp_path).template == template


def test_nonsense_in_settings_is_ignored_and_damage_is_named(tmp_path: Path) -> None:
    _write(
        tmp_path / "config.json",
        {
            "eos_token_id": [True, -1, "x", 10**12, None, 3],
            "bos_token_id": {},
            "max_position_embeddings": 1e9,
        },
    )
    texts = textfiles.of_directory(tmp_path)
    assert (texts.eos, texts.bos, texts.context) == ((3,), None, None)
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ModelError, match="damaged"):
        textfiles.of_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b"[]")
    with pytest.raises(ModelError, match="holds no settings"):
        textfiles.of_directory(tmp_path)


def test_a_huge_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 1024 * 1024)
    with pytest.raises(ModelError, match="is longer than"):
        textfiles.of_directory(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    _write(tmp_path / "tokenizer_config.json", {"chat_template": "x" * 1024 * 1024})
    with pytest.raises(ModelError, match="at most"):
        textfiles.of_directory(tmp_path)


def _write(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree), encoding="utf-8")


# ── the store ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path) -> None:
    assert store.listing(tmp_path / "not there") == []
    with pytest.raises(ModelError, match="meshinfer pull smollm2"):
        store.find(tmp_path, "x")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff" * 100, b"[" * 100_000])
def test_a_damaged_model_is_listed_as_damaged_and_can_be_removed(
    content: bytes | None, tmp_path: Path
) -> None:
    model = ModelId("ab" * 32)
    (tmp_path / model).mkdir()
    if content is not None:
        (tmp_path / model / "manifest.json").write_bytes(content)
    (only,) = store.listing(tmp_path)
    assert only.files is None
    assert only.damage.isprintable()
    with pytest.raises(ModelError):
        store.find(tmp_path, model[:8])
    store.remove(tmp_path, model)
    assert store.listing(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelError, match="no model abab"):
        store.remove(tmp_path, model)


@pytest.mark.parametrize("model", ["..", "/", "", "a/b", "AB" * 32, ".pulls"])
def test_nothing_but_a_model_is_ever_removed(model: str, tmp_path: Path) -> None:
    (tmp_path / ".pulls").mkdir()
    with pytest.raises(ModelError):
        store.remove(tmp_path / ".pulls", ModelId(model))
    assert (tmp_path / ".pulls").is_dir()


# ── other programs, locks, disk ─────────────────────────────────────────────────────────────────────────────


def test_a_crash_of_a_child_is_an_error_here(tmp_path: Path) -> None:
    status, _, _ = process.run([sys.executable, "-c", "import os; os.abort()"], tmp_path)
    assert status not in (0, 1)
    with pytest.raises(ModelError, match="the conversion failed"):
        process.task(["gguf"], tmp_path, "[]")


def test_a_child_ends_with_what_watches_it(tmp_path: Path) -> None:
    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    import psutil

    with pytest.raises(KeyboardInterrupt):
        process.run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, watch=interrupt)
    assert psutil.Process().children() == []


def test_a_lock_is_held_against_other_processes_and_falls_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    code = (
        "import sys, pathlib; from meshinfer.model.lock import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])) as alone: print(alone, flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "True"
    with exclusive(path) as alone:
        assert not alone
    holder.kill()
    holder.communicate()
    with exclusive(path) as alone:
        assert alone


def test_too_little_disk_is_told_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"needs 1073741824\.0 GiB and the disk of .* has [\d.]+ .iB free"):
        space.require(tmp_path, 2**60, "getting a model")
