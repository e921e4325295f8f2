"""If these failed, a model would be served that answers otherwise than it should, and nobody would know."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from model_zoo import NAMES, NO_TEXTS, adopted, changed, empty, weights_of, xml_of

from meshinfer.errors import ModelError
from meshinfer.limits import NEAR_TIE
from meshinfer.model import verify as verification
from meshinfer.model.build import adopt, build_manifest
from meshinfer.model.graph_check import check
from meshinfer.model.progress import Silent
from meshinfer.model.verify import verify
from meshinfer.model.weights import ModelFiles


def taken_in(xml: Path, weights: Path, store: Path) -> ModelFiles:
    manifest = build_manifest(xml, weights, NO_TEXTS, Silent())
    return adopt(store, manifest, "changed", xml, weights, NO_TEXTS, Silent())


def other_mask(tmp_path: Path) -> ModelFiles:
    """llama with a mask that hides nothing. The paged-attention pass does not see it: it always masks."""
    weights = bytearray(weights_of("llama").read_bytes())
    constants = check(xml_of("llama").read_bytes(), len(weights)).constants
    hidden = next(c for c in constants if c.name == "__module.model/aten::to/Convert_6")
    assert struct.unpack_from("<f", weights, hidden.offset)[0] < -1e4
    struct.pack_into("<f", weights, hidden.offset, 0.0)
    xml, numbers = changed("llama", tmp_path / "source", weights=bytes(weights))
    return taken_in(xml, numbers, tmp_path / "store")


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_every_model_changes_nothing(name: str, tmp_path: Path) -> None:
    report = verify(adopted(name, tmp_path), Silent())
    assert report.max_abs_diff == 0.0, report
    assert report.max_abs_diff_original < 1e-5
    assert report.greedy_equal
    assert report.holds
    assert (report.layers, report.cuts) == (6, 7)
    assert report.tokens > 100


def test_the_quick_form_finds_the_same(tmp_path: Path) -> None:
    class Watches:
        seen: tuple[int, int] = (0, 0)

        def update(self, stage: str, done: int, total: int) -> None:
            assert self.seen[0] < done <= total
            self.seen = done, total

    watches = Watches()
    report = verify(adopted("phi3", tmp_path), watches, quick=True)
    assert report.holds
    assert watches.seen[0] == watches.seen[1] > 6
    assert set(report.to_json()) >= {
        "model", "layers", "cuts", "max_abs_diff", "max_abs_diff_original", "greedy_equal"
    }  # fmt: skip
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["max_abs_diff"] == 0.0
    assert "7 cuts" in report.sentence()


@pytest.mark.parametrize("quick", [True, False])
def test_a_model_that_the_pass_changes_without_a_word_is_caught(tmp_path: Path, quick: bool) -> None:
    report = verify(other_mask(tmp_path), Silent(), quick)
    assert report.max_abs_diff == 0.0
    assert report.max_abs_diff_original > 1e-3
    assert not report.holds
    assert "otherwise than as it came" in report.sentence()
    assert report.to_json()["reason"] == report.reason


def test_a_cut_that_changes_something_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for by a span of other layers: what a wrong cut would be, these models do not have."""
    from meshinfer.model.graph import PagedGraph
    from meshinfer.values import Span

    honest = PagedGraph.span

    def shifted(self: PagedGraph, span: Span) -> object:
        return honest(self, Span(span.first, span.last) if span.first != 4 else Span(3, 4))

    files = adopted("qwen2", tmp_path)
    monkeypatch.setattr(PagedGraph, "span", shifted)
    report = verify(files, Silent(), quick=True)
    assert report.max_abs_diff > 0.0
    assert "cut into layers" in report.reason


def test_numbers_that_are_none_are_a_reason(tmp_path: Path) -> None:
    """NaN is neither equal nor greater: comparisons written the other way round would let it pass."""
    weights = bytearray(weights_of("llama").read_bytes())
    constants = check(xml_of("llama").read_bytes(), len(weights)).constants
    matrix = next(constant for constant in constants if "layers.3.mlp.down_proj" in constant.name)
    struct.pack_into("<f", weights, matrix.offset, float("nan"))
    xml, numbers = changed("llama", tmp_path / "source", weights=bytes(weights))
    report = verify(taken_in(xml, numbers, tmp_path / "store"), Silent(), quick=True)
    assert not report.holds
    assert report.to_json()["max_abs_diff_original"] is None


def test_only_a_whole_model_is_verified(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not all here"):
        verify(empty("llama", tmp_path), Silent())


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    files = adopted("gpt2", tmp_path)
    before = sorted(files.directory.iterdir())
    verify(files, Silent(), quick=True)
    assert sorted(files.directory.iterdir()) == before


def test_near_ties_are_counted_and_set_aside_and_nothing_else_is() -> None:
    original = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0 - NEAR_TIE / 2], [0.0, 1.0, 0.5]], np.float32)
    paged = np.array([[0.0, 1.0, 0.0], [0.0, 1.0 - NEAR_TIE, 1.0], [0.0, 0.5, 1.0]], np.float32)
    assert verification._greedy([[paged]], [[original]]) == (3, 2, 1)
    assert verification._greedy([[paged[:2]]], [[original[:2]]]) == (2, 1, 1)


def test_models_that_give_the_last_rows_logits_only_are_compared_by_these() -> None:
    original = np.ones((1, 4), np.float32)
    paged = np.stack([np.zeros(4), np.zeros(4), np.full(4, 1.5)]).astype(np.float32)[:, None]
    assert verification._difference([[paged]], [[original]]) == 0.5
