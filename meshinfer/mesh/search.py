"""The search behind placement: which lanes, in which order, each with how many layers, cost least in all.

A lane is a peer as integers. Costs are exact integers of any size, so that every agent finds the same chain.
The cost of a chain is the sum over its lanes of `price` × work of its layers, plus `hop` for each lane: a
token passes them one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from meshinfer.values import Span

EXACT_LANES = 10
"""Up to so many lanes all orders and cuts are searched: 2^10 sets of lanes are one millisecond of pruning
tables."""

SEARCH_STEPS = 100_000
"""Partial chains that the exact search may look at, about 0.6 s; a count and not a time, so that all stop
alike."""

BEAM_LANES = 2520
"""Lanes tried at each step of the search for a tight fit, over all the chains that it keeps. With ten lanes
these are 252 chains, as many as there are sets of five: then it misses nothing."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One peer. `reach[a]` is the greatest `b` for which layers [a, b) fit there, `a` where not even one
    does."""

    price: int
    reach: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.reach) - 1


@dataclass(frozen=True, slots=True)
class Link:
    """A lane of a chain, by its index, and the layers that it runs."""

    lane: int
    span: Span


Chain = tuple[Link, ...]


def back_of(reach: Sequence[int]) -> tuple[int, ...]:
    """The mirror of `reach`: for each `b` the least `a` for which [a, b) fits."""
    back, first = [], 0
    for last in range(len(reach)):
        while reach[first] < last:
            first += 1
        back.append(first)
    return tuple(back)


def exact_chain(lanes: Sequence[Lane], work: Sequence[int], hop: int, fewest: int) -> Chain | None:
    """The cheapest chain of at least `fewest` of at most `EXACT_LANES` lanes; None where none was found.

    A* over (layers done, lanes used): see `_Search.rest` for the bound that it is led by. Without a result
    the search was either exhausted or given up after `SEARCH_STEPS`; `coverable` tells whether a chain exists
    at all.
    """
    return _Search(lanes, tuple(accumulate(work, initial=0)), hop, fewest).run()


def coverable(lanes: Sequence[Lane]) -> bool:
    """Whether some order of these lanes holds all layers; exact, for at most `EXACT_LANES` of them."""
    return _least_start(lanes)[-1] == 0


def _least_start(lanes: Sequence[Lane]) -> list[int]:
    """For each set of lanes (a bit mask) the least layer from which they can hold all the rest.

    Filling each from the right as far as it goes is best, since a span that fits still fits without its first
    layers.
    """
    layers = lanes[0].layers
    backs = [back_of(lane.reach) for lane in lanes]
    least = [layers] * (1 << len(lanes))
    for used in range(1, len(least)):
        least[used] = min(backs[i][least[used ^ (1 << i)]] for i in range(len(lanes)) if used >> i & 1)
    return least


@dataclass(slots=True)
class _Search:
    """One run of the exact search. A state is (layers done, bit mask of the lanes used)."""

    lanes: Sequence[Lane]
    done: tuple[int, ...]  # done[a]: the work of layers [0, a)
    hop: int
    fewest: int
    _least: list[int] = field(init=False)
    _most: list[int] = field(init=False)  # the most work that each lane can hold at all
    _by_price: list[int] = field(init=False)
    _twin: list[int] = field(init=False)  # the first lane that is equal to this one
    _bounds: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _frees: dict[int, tuple[list[tuple[int, int]], list[int]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._least = _least_start(self.lanes)
        self._most = [_most_work(lane, self.done) for lane in self.lanes]
        self._by_price = sorted(range(len(self.lanes)), key=lambda i: (self.lanes[i].price, i))
        self._twin = _twins(self.lanes)

    def run(self) -> Chain | None:
        layers, steps = self.lanes[0].layers, 0
        cost = {(0, 0): 0}
        came: dict[tuple[int, int], tuple[int, int]] = {}
        queue = [(self.rest(0, 0), layers, 0)]
        while queue and steps < SEARCH_STEPS:
            bound, left, used = heapq.heappop(queue)
            at = layers - left
            if at == layers:
                return self._chain(came, used)
            here = cost[at, used]
            if bound > here + self.rest(at, used):
                continue  # a cheaper way to this state was found after it had been queued
            for last, then, price in self._next(at, used):
                steps += 1
                total = here + price
                if total < cost.get((last, then), total + 1):
                    cost[last, then] = total
                    came[last, then] = (at, used)
                    heapq.heappush(queue, (total + self.rest(last, then), layers - last, then))
        return None

    def rest(self, at: int, used: int) -> int:
        """A lower bound of what layers [at, end) cost: their work is poured into the cheapest free lanes,
        each up to the most work that it can hold anywhere, and hops are counted as if the roomiest lanes were
        taken."""
        known = self._bounds.get((at, used))
        if known is None:
            known = self._bounds[at, used] = self._pour(at, used)
        return known

    def _pour(self, at: int, used: int) -> int:
        free, roomiest = self._free_lanes(used)
        whole = self.done[-1] - self.done[at]
        left, cost = whole, 0
        for room, price in free:
            if left <= room:
                cost += left * price
                break
            cost += room * price
            left -= room
        left, hops = whole, 0
        for room in roomiest:
            if left <= 0:
                break
            left -= room
            hops += 1
        return cost + self.hop * max(hops, self.fewest - used.bit_count())

    def _free_lanes(self, used: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Lanes that are not used: (most work, price) by price, and the most work of each, greatest first."""
        known = self._frees.get(used)
        if known is None:
            free = [(self._most[i], self.lanes[i].price) for i in self._by_price if not used >> i & 1]
            known = self._frees[used] = (free, sorted((room for room, _ in free), reverse=True))
        return known

    def _next(self, at: int, used: int) -> list[tuple[int, int, int]]:
        """Ways to go on: (layers done then, lanes used then, cost). Of equal lanes the first free one stands
        for all."""
        layers, everyone = self.lanes[0].layers, (1 << len(self.lanes)) - 1
        still = max(0, self.fewest - used.bit_count() - 1)  # further lanes that must each get a layer
        ways: list[tuple[int, int, int]] = []
        tried: set[int] = set()
        for i, lane in enumerate(self.lanes):
            if used >> i & 1 or self._twin[i] in tried:
                continue
            tried.add(self._twin[i])
            then = used | 1 << i
            for last in range(
                max(at + 1, self._least[everyone ^ then]), min(lane.reach[at], layers - still) + 1
            ):
                ways.append((last, then, self.hop + lane.price * (self.done[last] - self.done[at])))
        return ways

    def _chain(self, came: dict[tuple[int, int], tuple[int, int]], used: int) -> Chain:
        links, state = [], (self.lanes[0].layers, used)
        while state in came:
            before = came[state]
            lane = (state[1] ^ before[1]).bit_length() - 1
            links.append(Link(lane, Span(before[0], state[0])))
            state = before
        return tuple(reversed(links))


def chosen_lanes(lanes: Sequence[Lane], hop_per_layer_work: int) -> tuple[int, ...]:
    """Good lanes out of many, as indices in order of price; empty where this rough view of them finds none.

    Each lane counts as the number of layers that fit wherever they lie, and all layers as equal work of 1.
    Then order does not matter, and in a best choice all lanes but the dearest are full: a knapsack, exact for
    equal layers.
    """
    layers = lanes[0].layers
    rooms = [_room_anywhere(lane) for lane in lanes]
    ranked = sorted((i for i in range(len(lanes)) if rooms[i]), key=lambda i: (lanes[i].price, -rooms[i], i))
    best: list[tuple[int, tuple[int, ...]] | None] = [(0, ())] + [None] * (layers - 1)
    found: tuple[int, tuple[int, ...]] | None = None
    for i in ranked:
        for full in range(layers - 1, -1, -1):  # downwards, so that a lane is taken once
            before = best[full]
            if before is None:
                continue
            taken = min(rooms[i], layers - full)
            way = (before[0] + hop_per_layer_work + lanes[i].price * taken, (*before[1], i))
            if full + taken == layers:
                found = way if found is None else min(found, way)
            else:
                then = best[full + taken]
                best[full + taken] = way if then is None else min(then, way)
    return () if found is None else found[1]


def _room_anywhere(lane: Lane) -> int:
    """How many neighbouring layers fit wherever they begin."""
    return min(
        (last - first for first, last in enumerate(lane.reach) if last < lane.layers), default=lane.layers
    )


def packed_lanes(lanes: Sequence[Lane], work: Sequence[int]) -> tuple[int, ...]:
    """Lanes that hold all layers though it is tight, in order of layers; empty where none were found.

    A beam search: chains grow by one full lane at a time, and those go on whose lanes were filled best. Its
    width falls with the number of lanes, so that a step takes the same time (a few ms) for many.
    """
    layers, done, twin = lanes[0].layers, tuple(accumulate(work, initial=0)), _twins(lanes)
    most = [_most_work(lane, done) for lane in lanes]
    beam: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())] if sum(most) >= done[-1] else []
    while beam:
        ways: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for waste, at, order in beam:
            tried = set()
            for i, lane in enumerate(lanes):
                last = lane.reach[at]
                if last == at or i in order or twin[i] in tried:
                    continue
                tried.add(twin[i])
                if last == layers:
                    return (*order, i)
                way = (waste + most[i] - (done[last] - done[at]), last, (*order, i))
                used = sum(1 << one for one in way[2])
                ways[used] = min(way, ways.get(used, way))
        beam = sorted(ways.values())[: max(8, BEAM_LANES // len(lanes))]
    return ()


def _most_work(lane: Lane, done: Sequence[int]) -> int:
    """The most work that a lane can hold anywhere."""
    return max(done[last] - done[first] for first, last in enumerate(lane.reach))


def _twins(lanes: Sequence[Lane]) -> list[int]:
    """For each lane the first one that is equal to it."""
    first: dict[Lane, int] = {}
    return [first.setdefault(lane, i) for i, lane in enumerate(lanes)]


def cut(
    order: Sequence[int],
    lanes: Sequence[Lane],
    work: Sequence[int],
    strain: Callable[[int, Span], int],
) -> Chain | None:
    """The cheapest spans for lanes in a given order, and among equally cheap ones the least sum of squared
    `strain`.

    `strain(lane, span)` says how full the lane would be; equal strain leaves the most room for keys and
    values.
    """
    layers, done = lanes[0].layers, tuple(accumulate(work, initial=0))
    ways: dict[int, tuple[int, int, Chain]] = {0: (0, 0, ())}
    for place, i in enumerate(order):
        still = len(order) - place - 1
        then: dict[int, tuple[int, int, Chain]] = {}
        for at, (cost, squares, chain) in ways.items():
            lasts = range(at + 1, min(lanes[i].reach[at], layers - still) + 1) if still else (layers,)
            for last in lasts:
                if last > lanes[i].reach[at]:
                    continue
                span = Span(at, last)
                price = cost + lanes[i].price * (done[last] - done[at])
                known = then.get(last)
                if known is not None and known[0] < price:
                    continue
                total = squares + strain(i, span) ** 2
                if known is None or (price, total) < known[:2]:
                    then[last] = (price, total, (*chain, Link(i, span)))
        ways = then
    return ways[layers][2] if layers in ways else None
