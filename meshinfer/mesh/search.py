"""The exact search behind placement, for few lanes: the cheapest chain, the one that moves least, the one whose slowest
stage is fastest."""

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

SEARCH_STEPS = 60_000
"""Partial chains that one exact search may look at, about 0.3 s; a count and not a time, so that all stop alike.
Six lanes and twelve layers have 37,440 at most, so it always ends for them."""

STAGE_BITS = 10
"""The slowest stage is minimised to one part in 2^10: each further bit is one more pass over the sets of lanes."""


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
    result the search was either exhausted or given up after so many steps; `stretched` tells whether a chain exists.
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
        layers = self.task.layers
        root = _Label(None, 0, 0, 0, 0, None)
        count = 0  # tells equal bounds apart, so that labels are never compared
        queue = [(self._moves[0], self.rest(0, 0), layers, count, root)]
        while queue and count < steps:
            _, _, left, _, label = heapq.heappop(queue)
            if left == 0:
                return label.chain()
            if label.before is not None and not self._stands(label):
                continue  # a better way to this state was found after it had been queued
            for then in self._next(label):
                count += 1
                rest = self.rest(then.at, then.used) if then.at < layers else 0
                if self.bounds.cost is not None and then.cost + rest > self.bounds.cost:
                    continue
                if self._improves(then):
                    bound = (then.moved + self._moves[then.at], then.cost + rest)
                    heapq.heappush(queue, (*bound, layers - then.at, count, then))
        return None

    def _state(self, label: _Label) -> tuple[int, int, int]:
        return label.at, label.used, -1 if label.lane is None else self._out[label.lane]

    def _stands(self, label: _Label) -> bool:
        return (label.moved, label.cost) in self._known[self._state(label)]

    def _improves(self, label: _Label) -> bool:
        """Whether nothing known there is as good in both respects; what it beats is forgotten."""
        known = self._known.setdefault(self._state(label), [])
        moved, cost = label.moved, label.cost
        if any(one[0] <= moved and one[1] <= cost for one in known):
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

    def _next(self, label: _Label) -> list[_Label]:
        """Ways to go on. Of equal lanes the first free one stands for all."""
        task, everyone = self.task, (1 << len(self.task.lanes)) - 1
        tried: set[int] = set()
        ways: list[_Label] = []
        for i in range(len(task.lanes)):
            if label.used >> i & 1 or self._twin[i] in tried:
                continue
            tried.add(self._twin[i])
            hop = task.into(label.lane, i)
            if hop is None:
                continue
            then = label.used | 1 << i
            # Further lanes must each get a layer, and those that are free then must reach the end.
            most = task.layers - max(0, task.fewest - then.bit_count())
            least = max(label.at + 1, self._least[everyone ^ then])
            ways += self._ways(label, i, hop, least, most)
        return ways

    def _ways(self, label: _Label, lane: int, hop: int, least: int, most: int) -> list[_Label]:
        task, one, at = self.task, self.task.lanes[lane], label.at
        used, ways = label.used | 1 << lane, []
        for last in reaches(task, lane, at, hop, self.bounds.stage):
            if not least <= last <= most:
                continue
            stage = hop + one.price * (task.done[last] - task.done[at])
            away = task.exit[lane] if last == task.layers else 0
            if away is not None:
                moved = one.moved(Span(at, last)) if self.bounds.still else 0
                ways.append(_Label(lane, last, used, label.moved + moved, label.cost + stage + away, label))
        return ways


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


def least_stage(task: Task) -> int | None:
    """The least time that all stages of some chain keep to, to one part in 2^`STAGE_BITS`; None where no chain holds
    all layers. For at most `EXACT_LANES` lanes."""
    chain, low = stretched(task), 0
    if chain is None:
        return None
    high = _slowest(task, chain)
    while high - low > high >> STAGE_BITS:
        middle = (low + high) // 2
        chain = stretched(task, middle)
        if chain is None:
            low = middle
        else:
            high = _slowest(task, chain)
    return high


def _slowest(task: Task, chain: Chain) -> int:
    return max(task.stages(chain) or (0,))


def stretched(task: Task, stage: int | None = None) -> Chain | None:
    """A chain whose stages all keep to `stage`, found by filling each lane as far as it goes; None where there is none.

    For each set of lanes and the last of them the farthest layer is all that counts: who is further can do whatever
    the other can, since a span that fits still fits without its first layers. With held spans, which need not fit
    without them, it may miss a chain.
    """
    return _Stretch(task, stage).run()


class _Reached(NamedTuple):
    """How far a set of lanes goes, and how."""

    at: int
    links: Chain


class _Stretch:
    def __init__(self, task: Task, stage: int | None) -> None:
        self._task = task
        self._stage = stage
        self._twin = twins(task)
        self._most = [self._most_work(i) for i in range(len(task.lanes))]
        self._potential: dict[int, int] = {}

    def _most_work(self, lane: int) -> int:
        """The most work that a lane can do anywhere in the time."""
        task, one = self._task, self._task.lanes[lane]
        most = max(task.done[b] - task.done[a] for a, b in enumerate(one.reach))
        most = max([most, *(task.done[span.last] - task.done[span.first] for span in one.held)])
        return most if self._stage is None else min(most, self._stage // max(1, one.price))

    def run(self) -> Chain | None:
        task = self._task
        front: dict[tuple[int, int | None], _Reached] = {(0, None): _Reached(0, ())}
        for count in range(1, len(task.lanes) + 1):
            then: dict[tuple[int, int | None], _Reached] = {}
            for (used, before), here in front.items():
                for lane, way in self._next(used, before, here, count):
                    if way.at == task.layers:
                        return way.links
                    state = (used | 1 << lane, lane)
                    if state not in then or way.at > then[state].at:
                        then[state] = way
            front = then
        return None

    def _next(
        self, used: int, before: int | None, here: _Reached, count: int
    ) -> Iterator[tuple[int, _Reached]]:
        task, tried = self._task, set[int]()
        if task.done[-1] - task.done[here.at] > self._free_work(used):
            return
        most = task.layers - max(0, task.fewest - count)
        for lane in range(len(task.lanes)):
            if used >> lane & 1 or self._twin[lane] in tried:
                continue
            tried.add(self._twin[lane])
            hop = task.into(before, lane)
            if hop is None:
                continue
            top = most if task.exit[lane] is not None else min(most, task.layers - 1)
            last = min(top, filled(task, lane, here.at, hop, self._stage))
            if last > here.at:
                yield lane, _Reached(last, (*here.links, Link(lane, Span(here.at, last))))
            yield from ((lane, way) for way in self._through_held(lane, here, hop, top))

    def _free_work(self, used: int) -> int:
        known = self._potential.get(used)
        if known is None:
            free = (most for i, most in enumerate(self._most) if not used >> i & 1)
            known = self._potential[used] = sum(free)
        return known

    def _through_held(self, lane: int, here: _Reached, hop: int, top: int) -> Iterator[_Reached]:
        """Held spans that the lane goes on with: the lane before gives back what lies beyond their beginning."""
        task = self._task
        for span in sorted(task.lanes[lane].held):
            if not span.first <= here.at < span.last <= top:
                continue
            if self._stage is not None and hop + task.compute(Link(lane, span)) > self._stage:
                continue
            links = here.links
            if here.at > span.first:
                one = links[-1]
                if one.span.first >= span.first or task.lanes[one.lane].reach[one.span.first] < span.first:
                    continue
                links = (*links[:-1], Link(one.lane, Span(one.span.first, span.first)))
            yield _Reached(span.last, (*links, Link(lane, span)))
