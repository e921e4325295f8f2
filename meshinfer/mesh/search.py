"""The exact search behind placement, for few lanes: the cheapest chain, or the one that moves least."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshinfer.mesh.lanes import ANY, Bounds, Chain, Hop, Link, Task, filled, least_hop, reaches, twins
from meshinfer.values import Span

EXACT_LANES = 10
"""Up to so many lanes all orders and cuts are searched: 2^10 sets of lanes are one millisecond of pruning
tables."""

SEARCH_STEPS = 40_000
"""Partial chains that one exact search may look at, about 0.2 s; a count and not a time, so that all stop alike.
Six lanes and twelve layers have 37,440 at most, so it always ends for them."""


def back_of(reach: Sequence[int]) -> tuple[int, ...]:
    """The mirror of `reach`: for each `b` the least `a` for which [a, b) fits."""
    back, first = [], 0
    for last in range(len(reach)):
        while reach[first] < last:
            first += 1
        back.append(first)
    return tuple(back)


def exact_chain(task: Task, bounds: Bounds = ANY, steps: int = SEARCH_STEPS) -> Chain | None:
    """The cheapest chain of at most `EXACT_LANES` lanes; None where none was found.

    A* over (layers done, lanes used, the last of them): see `_Search.rest` for the bound that it is led by. Without a
    result the search was either exhausted or given up after so many steps; `stages.covered` tells whether there is a
    chain at all.
    """
    return _Search(task, bounds).run(steps)


class _Label(NamedTuple):
    """A partial chain: its last lane, the layers done, the lanes used (a bit mask), and what led to it."""

    lane: int | None
    at: int
    used: int
    moved: int
    cost: int
    before: _Label | None

    def chain(self) -> Chain:
        links: list[Link] = []
        label = self
        while label.before is not None and label.lane is not None:
            links.append(Link(label.lane, Span(label.before.at, label.at)))
            label = label.before
        return tuple(reversed(links))


@dataclass(slots=True)
class _Search:
    """One run of the exact search."""

    task: Task
    bounds: Bounds
    _least_hop: int = field(init=False)
    _reach: list[list[int]] = field(init=False)  # how far each lane can go at best, held spans included
    _most: list[int] = field(init=False)  # the most work that each lane can do at all
    _least: list[int] = field(init=False)
    _moves: list[int] = field(init=False)  # the fewest bytes moved for layers [a, end)
    _by_price: list[int] = field(init=False)
    _twin: list[int] = field(init=False)
    _out: list[int] = field(init=False)  # lanes with the same number have the same hops to all others
    _bounds: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _frees: dict[int, tuple[list[tuple[int, int]], list[int]]] = field(init=False, default_factory=dict)
    _known: dict[tuple[int, int, int], list[tuple[int, int]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        task, lanes = self.task, range(len(self.task.lanes))
        self._least_hop = least_hop(
            hop for i, row in enumerate(task.hops) for j, hop in enumerate(row) if i != j
        )
        self._reach = [self._farthest(i) for i in lanes]
        self._most = [max(task.done[b] - task.done[a] for a, b in enumerate(reach)) for reach in self._reach]
        self._least = _least_start(self._reach)
        self._moves = _least_moves(task) if self.bounds.still else [0] * (task.layers + 1)
        self._by_price = sorted(lanes, key=lambda i: (task.lanes[i].price, i))
        self._twin = twins(task)
        self._out = _exits(task)

    def _farthest(self, lane: int) -> list[int]:
        task = self.task
        ways = [task.entry[lane], *(task.hops[j][lane] for j in range(len(task.lanes)) if j != lane)]
        hop = least_hop(ways)
        reach = [filled(task, lane, at, hop, self.bounds.stage) for at in range(task.layers + 1)]
        for span in task.lanes[lane].held:
            for at in range(span.first, span.last):
                reach[at] = max(reach[at], span.last)
        return reach

    def run(self, steps: int) -> Chain | None:
        layers, moves, limit = self.task.layers, self._moves, self.bounds.cost
        root = _Label(None, 0, 0, 0, 0, None)
        count = 0  # tells equal bounds apart, so that labels are never compared
        queue = [(moves[0], self.rest(0, 0), layers, count, root)]
        while queue and count < steps:
            _, _, left, _, label = heapq.heappop(queue)
            if left == 0:
                return label.chain()
            if label.before is not None and not self._stands(label):
                continue  # a better way to this state was found after it had been queued
            for lane, hop, ends in self._next(label):
                used, out = label.used | 1 << lane, self._out[lane]
                for last in ends:
                    count += 1
                    moved, cost = self._way(label, lane, hop, last)
                    rest = self.rest(last, used) if last < layers else 0
                    if limit is not None and cost + rest > limit:
                        continue
                    if self._improves((last, used, out), moved, cost):
                        then = _Label(lane, last, used, moved, cost, label)
                        heapq.heappush(queue, (moved + moves[last], cost + rest, layers - last, count, then))
        return None

    def _way(self, label: _Label, lane: int, hop: int, last: int) -> tuple[int, int]:
        """The bytes moved and the cost after going on with a lane to a layer."""
        task, one = self.task, self.task.lanes[lane]
        cost = label.cost + hop + one.price * (task.done[last] - task.done[label.at])
        if last == len(task.done) - 1:
            cost += task.exit[lane] or 0
        return label.moved + (one.moved(Span(label.at, last)) if self.bounds.still else 0), cost

    def _stands(self, label: _Label) -> bool:
        state = (label.at, label.used, -1 if label.lane is None else self._out[label.lane])
        return (label.moved, label.cost) in self._known[state]

    def _improves(self, state: tuple[int, int, int], moved: int, cost: int) -> bool:
        """Whether nothing known there is as good in both respects; what it beats is forgotten."""
        known = self._known.get(state)
        if known is None:
            self._known[state] = [(moved, cost)]
            return True
        for one in known:
            if one[0] <= moved and one[1] <= cost:
                return False
        known[:] = [one for one in known if one[0] < moved or one[1] < cost]
        known.append((moved, cost))
        return True

    def rest(self, at: int, used: int) -> int:
        """A lower bound of what layers [at, end) cost: their work is poured into the cheapest free lanes, each up to
        the most work that it can do anywhere, and as many of the cheapest hops are counted as if the roomiest lanes
        were taken."""
        known = self._bounds.get((at, used))
        if known is None:
            known = self._bounds[at, used] = self._pour(at, used)
        return known

    def _pour(self, at: int, used: int) -> int:
        free, roomiest = self._free_lanes(used)
        whole = self.task.done[-1] - self.task.done[at]
        left, cost = whole, 0
        for room, price in free:
            if left <= room:
                cost += left * price
                break
            cost += room * price
            left -= room
        left, lanes = whole, 0
        for room in roomiest:
            if left <= 0:
                break
            left -= room
            lanes += 1
        hops = max(lanes, self.task.fewest - used.bit_count())
        ends = least_hop(self.task.exit)
        if not used:
            return cost + ends + least_hop(self.task.entry) + self._least_hop * max(0, hops - 1)
        return cost + ends + self._least_hop * hops

    def _free_lanes(self, used: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Lanes that are not used: (most work, price) by price, and the most work of each, greatest first."""
        known = self._frees.get(used)
        if known is None:
            free = [(self._most[i], self.task.lanes[i].price) for i in self._by_price if not used >> i & 1]
            known = self._frees[used] = (free, sorted((room for room, _ in free), reverse=True))
        return known

    def _next(self, label: _Label) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Lanes to go on with, the hop to each, and how far each may go. Of equal lanes the first free one stands for
        all."""
        task, everyone = self.task, (1 << len(self.task.lanes)) - 1
        tried: set[int] = set()
        for lane in range(len(task.lanes)):
            if label.used >> lane & 1 or self._twin[lane] in tried:
                continue
            tried.add(self._twin[lane])
            hop = task.into(label.lane, lane)
            if hop is None:
                continue
            then = label.used | 1 << lane
            # Further lanes must each get a layer, and those that are free then must reach the end.
            most = task.layers - max(0, task.fewest - then.bit_count())
            if task.exit[lane] is None:
                most = min(most, task.layers - 1)
            least = max(label.at + 1, self._least[everyone ^ then])
            ends = reaches(task, lane, label.at, hop, self.bounds.stage)
            yield lane, hop, [last for last in ends if least <= last <= most]


def _least_start(reaches: Sequence[Sequence[int]]) -> list[int]:
    """For each set of lanes (a bit mask) the least layer from which they can hold all the rest.

    Filling each from the right as far as it goes is best, since a span that fits still fits without its first
    layers.
    """
    layers = len(reaches[0]) - 1
    backs = [back_of(reach) for reach in reaches]
    least = [layers] * (1 << len(reaches))
    for used in range(1, len(least)):
        least[used] = min(backs[i][least[used ^ (1 << i)]] for i in range(len(reaches)) if used >> i & 1)
    return least


def _least_moves(task: Task) -> list[int]:
    """For each layer `a` the fewest bytes that any lanes must move to hold [a, end): held spans are free."""
    layers = task.layers
    least = [0] * (layers + 1)
    held: dict[int, set[int]] = {}
    for lane in task.lanes:
        for span in lane.held:
            held.setdefault(span.first, set()).add(span.last)
    for at in range(layers - 1, -1, -1):
        one = Span(at, at + 1)
        anew = min(lane.load[at + 1] - lane.load[at] if lane.load else 0 for lane in task.lanes)
        least[at] = min([anew + least[one.last], *(least[last] for last in held.get(at, ()))])
    return least


def _exits(task: Task) -> list[int]:
    """Numbers for lanes; those whose hops to all others cost one and the same have one number, as last lanes."""
    numbers: dict[Hop, int] = {}
    result = []
    for i, row in enumerate(task.hops):
        away = {hop for j, hop in enumerate(row) if j != i}
        result.append(numbers.setdefault(next(iter(away), None), i) if len(away) <= 1 else i)
    return result
