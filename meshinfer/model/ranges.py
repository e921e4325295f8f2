"""Divides a file of weights into pieces: who needs which bytes, cut so that what is shared is one piece for
all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshinfer.limits import PIECE_BYTES, SMALL_CONSTANT_BYTES
from meshinfer.model.graph_check import ConstantRange


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `[offset, end)` of the weights, and the numbers of the segments that need them."""

    offset: int
    end: int
    segments: frozenset[int]


def divide(
    constants: Sequence[ConstantRange],
    reads: Sequence[Mapping[str, int]],
    remaining: Collection[str],
) -> list[Range]:
    """Ranges of at most `PIECE_BYTES`, sorted, apart; segment `len(reads)` is that of bytes which no other
    needs.

    `reads` holds for each segment the constants that it reads (bytes by name), after the paged-attention
    pass; `remaining` the names of all constants after it. Small constants, which every peer has anyway,
    count for nobody.
    """
    large = [constant for constant in constants if not constant.small]
    known = {(constant.name, constant.size) for constant in large}
    vanished = {constant.name for constant in large if constant.name not in remaining}
    owners: dict[str, set[int]] = {constant.name: set() for constant in large}
    for segment, read in enumerate(reads):
        own = {name for name, size in read.items() if (name, size) in known}
        made = any(size >= SMALL_CONSTANT_BYTES for name, size in read.items() if name not in own)
        # The pass computed a large constant here, from ones that are gone: which ones is not recorded, so
        # all of them.
        for name in own | vanished if made else own:
            owners[name].add(segment)
    rest = len(reads)
    marked = [(constant.offset, constant.end, owners[constant.name] or {rest}) for constant in large]
    return [piece for whole in _merged(_elementary(marked)) for piece in _pieces(whole)]


def _elementary(marked: Iterable[tuple[int, int, Collection[int]]]) -> list[Range]:
    """The parts between all beginnings and ends, each with everyone who needs it."""
    changes: dict[int, Counter[int]] = {}
    for offset, end, segments in marked:
        changes.setdefault(offset, Counter()).update(segments)
        changes.setdefault(end, Counter()).subtract(segments)
    found: list[Range] = []
    needed: Counter[int] = Counter()
    begin = 0
    for offset in sorted(changes):
        segments = frozenset(segment for segment, count in needed.items() if count)
        if segments:
            found.append(Range(begin, offset, segments))
        needed.update(changes[offset])
        begin = offset
    return found


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Neighbours that the same segments need become one; what little lies between them (small constants,
    padding) with them.
    """
    merged: list[Range] = []
    for item in ranges:
        last = merged[-1] if merged else None
        if last and last.segments == item.segments and item.offset - last.end <= SMALL_CONSTANT_BYTES:
            merged[-1] = Range(last.offset, item.end, last.segments)
        else:
            merged.append(item)
    return merged


def _pieces(whole: Range) -> Iterable[Range]:
    for offset in range(whole.offset, whole.end, PIECE_BYTES):
        yield Range(offset, min(offset + PIECE_BYTES, whole.end), whole.segments)
