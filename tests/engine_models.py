"""Shards of the small models that lie in tests/data/zoo, for the tests of the engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshinfer.engine.device import core
from meshinfer.engine.rows import RowsModel
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.step import Chunk, Rows
from meshinfer.model.graph import PagedGraph
from meshinfer.model.mapping import weights_tensor
from meshinfer.values import Precision, Span

ZOO = Path(__file__).parent / "data" / "zoo"


@functools.cache
def graph(name: str) -> PagedGraph:
    return PagedGraph(
        (ZOO / name / "openvino_model.xml").read_bytes(), weights_tensor(ZOO / name / "openvino_model.bin")
    )


def shard(
    name: str = "llama",
    first: int = 0,
    last: int = 6,
    *,
    precision: Precision = Precision.EXACT,
    pool_tokens: int = 1024,
    context: int = 2048,
) -> PagedShard:
    return PagedShard(graph(name).span(Span(first, last)), "CPU", precision, pool_tokens, context=context)


def ends(name: str) -> tuple[RowsModel, RowsModel]:
    """Embedding and head."""
    model = graph(name)
    return (
        RowsModel(model.embedding(), "CPU", Precision.EXACT),
        RowsModel(model.head(), "CPU", Precision.EXACT),
    )


def rows(count: int, seed: int = 0, hidden: int = 64) -> Rows:
    return np.random.default_rng(seed).standard_normal((count, hidden), dtype=np.float32)


def run(on: PagedShard, sequence: object, data: Rows, position: int = 0, want: int | None = None) -> Rows:
    """One step of one chunk."""
    return on.step([Chunk(sequence, position, data, len(data) if want is None else want)], 0.0)[0]


def original_logits(name: str, tokens: Sequence[int]) -> Rows:
    """Logits `[n, vocabulary]` of the model as it came: stateful, uncut, f32."""
    model = core().read_model(ZOO / name / "openvino_model.xml")
    request = (
        core()
        .compile_model(
            model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        )
        .create_infer_request()
    )
    count = len(tokens)
    given = {
        "input_ids": np.array([tokens], np.int64),
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    wanted = {name for port in request.model_inputs for name in port.get_names()}
    result = request.infer({name: value for name, value in given.items() if name in wanted})
    return np.array(result[0][0])
