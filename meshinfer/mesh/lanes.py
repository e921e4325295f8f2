"""What placement searches among: lanes, which are peers as integers, and the chains that they make.

Costs are exact integers of any size, so that every agent finds the same chain. A chain's cost is the sum over its lanes
of `price` × work of its layers, plus what it costs to pass from lane to lane: a token passes them one after the other.
A stage is one lane's part of that, with the hop that leads to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshinfer.values import Span


@dataclass(frozen=True, slots=True)
class Lane:
    """One peer. `reach[a]` is the greatest `b` for which layers [a, b) fit there, `a` where not even one does.

    `held` are spans that are loaded there: they fit, whatever `reach` says. `load[b] - load[a]` are the bytes that
    must be moved for any other span [a, b) to be there.
    """

    price: int
    reach: tuple[int, ...]
    held: frozenset[Span] = frozenset()
    load: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.reach) - 1

    def fits(self, span: Span) -> bool:
        return span.last <= self.reach[span.first] or span in self.held

    def moved(self, span: Span) -> int:
        return 0 if span in self.held or not self.load else self.load[span.last] - self.load[span.first]


class Link(NamedTuple):
    """A lane of a chain, by its index, and the layers that it runs."""

    lane: int
    span: Span


Chain = tuple[Link, ...]
Hop = int | None
"""What it costs to pass from one lane to another; None where that is not to be."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is searched. `done[b]` is the work of layers [0, b); `hops[i][j]` leads from lane i to lane j, `entry[i]` to
    lane i as the first, `exit[i]` away from it as the last. A chain has at least `fewest` lanes."""

    lanes: tuple[Lane, ...]
    done: tuple[int, ...]
    hops: tuple[tuple[Hop, ...], ...]
    entry: tuple[Hop, ...]
    exit: tuple[Hop, ...]
    fewest: int = 1

    @property
    def layers(self) -> int:
        return len(self.done) - 1

    def into(self, before: int | None, lane: int) -> Hop:
        return self.entry[lane] if before is None else self.hops[before][lane]

    def compute(self, link: Link) -> int:
        return self.lanes[link.lane].price * (self.done[link.span.last] - self.done[link.span.first])

    def stages(self, chain: Chain) -> list[int] | None:
        """What each lane takes, the hop to it included; None for a chain that a forbidden hop breaks."""
        stages, before = [], None
        for link in chain:
            hop = self.into(before, link.lane)
            if hop is None:
                return None
            stages.append(hop + self.compute(link))
            before = link.lane
        return stages

    def cost(self, chain: Chain) -> int | None:
        """What a token takes through the chain; None as in `stages`."""
        stages, last = self.stages(chain), self.exit[chain[-1].lane]
        return None if stages is None or last is None else sum(stages) + last

    def moved(self, chain: Chain) -> int:
        """Bytes to be moved until the chain can run."""
        return sum(self.lanes[link.lane].moved(link.span) for link in chain)

    def among(self, chosen: Sequence[int]) -> Task:
        """The same with these lanes only, which are numbered anew."""
        return Task(
            tuple(self.lanes[i] for i in chosen),
            self.done,
            tuple(tuple(self.hops[i][j] for j in chosen) for i in chosen),
            tuple(self.entry[i] for i in chosen),
            tuple(self.exit[i] for i in chosen),
            self.fewest,
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a chain may cost and each of its stages may take. With `still` the fewest moved bytes come first, then
    cost."""

    cost: int | None = None
    stage: int | None = None
    still: bool = False


ANY = Bounds()


def filled(task: Task, lane: int, at: int, hop: int, stage: int | None) -> int:
    """How far a lane goes from `at` on, in its memory and in what a stage may take; `at` where nowhere."""
    last = task.lanes[lane].reach[at]
    if stage is None or last == at:
        return last
    price = task.lanes[lane].price
    if stage < hop or price <= 0:
        return at if stage < hop else last
    return min(last, bisect_right(task.done, task.done[at] + (stage - hop) // price) - 1)


def reaches(task: Task, lane: int, at: int, hop: int, stage: int | None) -> Sequence[int]:
    """All the ends that a lane's span from `at` on may have, the hop to it being known."""
    one, last = task.lanes[lane], filled(task, lane, at, hop, stage)
    beyond = [span.last for span in one.held if span.first == at and span.last > last]
    if not beyond:
        return range(at + 1, last + 1)
    allowed = (end for end in beyond if _in_time(task, lane, Span(at, end), hop, stage))
    return (*range(at + 1, last + 1), *sorted(end for end in allowed if end > one.reach[at]))


def _in_time(task: Task, lane: int, span: Span, hop: int, stage: int | None) -> bool:
    return stage is None or hop + task.compute(Link(lane, span)) <= stage


def twins(task: Task) -> list[int]:
    """For each lane the first one that is like it in all respects, its hops included, or itself: the two could change
    places in any chain."""
    first: dict[Lane, list[int]] = {}
    result = []
    for i, lane in enumerate(task.lanes):
        alike = first.setdefault(lane, [])
        twin = next((j for j in alike if _interchangeable(task, i, j)), i)
        if twin == i:
            alike.append(i)
        result.append(twin)
    return result


def _interchangeable(task: Task, i: int, j: int) -> bool:
    hops = task.hops
    if (task.entry[i], task.exit[i], hops[i][j]) != (task.entry[j], task.exit[j], hops[j][i]):
        return False
    others = (k for k in range(len(hops)) if k not in (i, j))
    return all(hops[i][k] == hops[j][k] and hops[k][i] == hops[k][j] for k in others)


def least_hop(hops: Iterable[Hop]) -> int:
    return min((hop for hop in hops if hop is not None), default=0)


def cut(
    task: Task, order: Sequence[int], strain: Callable[[int, Span], int], bounds: Bounds = ANY
) -> Chain | None:
    """The best spans for lanes in a given order, and of equally good ones those with the least sum of squared `strain`.

    `strain(lane, span)` says how full the lane would be; equal strain leaves the most room for keys and values. What a
    chain costs in all is not looked at.
    """
    ways: dict[int, _Way] = {0: _Way(0, 0, 0, None, None)}
    before = None
    for place, lane in enumerate(order):
        hop = task.into(before, lane)
        if hop is None:
            return None
        ways = _cuts(task, ways, lane, hop, len(order) - place - 1, strain, bounds)
        before = lane
    way = ways.get(task.layers)
    return None if way is None or before is None or task.exit[before] is None else way.chain()


class _Way(NamedTuple):
    """The best cut of the first layers: the bytes that it moves (0 where that does not count), cost, strain."""

    moved: int
    cost: int
    squares: int
    link: Link | None
    before: _Way | None

    def chain(self) -> Chain:
        links: list[Link] = []
        way = self
        while way.link is not None and way.before is not None:
            links.append(way.link)
            way = way.before
        return tuple(reversed(links))


def _cuts(
    task: Task,
    ways: dict[int, _Way],
    lane: int,
    hop: int,
    still: int,
    strain: Callable[[int, Span], int],
    bounds: Bounds,
) -> dict[int, _Way]:
    """The best ways with one lane more, by layers done; `still` further lanes each need a layer."""
    then: dict[int, _Way] = {}
    for at, way in ways.items():
        for last in reaches(task, lane, at, hop, bounds.stage):
            if last > task.layers - still or (not still and last < task.layers):
                continue
            link = Link(lane, Span(at, last))
            moved = way.moved + (task.lanes[lane].moved(link.span) if bounds.still else 0)
            cost = way.cost + task.compute(link)
            known = then.get(last)
            if known is not None and known[:2] < (moved, cost):
                continue
            squares = way.squares + strain(lane, link.span) ** 2
            if known is None or (moved, cost, squares) < known[:3]:
                then[last] = _Way(moved, cost, squares, link, way)
    return then
