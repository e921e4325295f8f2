"""The search behind placement, for many lanes: good chains in bounded time, where all of them cannot be tried.

Lanes are first chosen as if layers were alike and order did not matter, then put in order, cut, and changed for better
ones as long as that helps. All counts are bounded, so that agents on slow PCs find the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations

from meshinfer.limits import ROUTE_HOPS
from meshinfer.mesh.lanes import ANY, Bounds, Chain, Lane, Link, Task, cut, filled, least_hop, twins
from meshinfer.mesh.search import EXACT_LANES, back_of, exact_chain
from meshinfer.values import Span

BEAM_LANES = 2520
"""Lanes tried at each step of the search for a tight fit, over all the chains that it keeps. With ten lanes
these are 252 chains, as many as there are sets of five: then it misses nothing."""

ANCHORS = 4
"""Lanes around which others are gathered by how near they are: one for each site of a mesh over several."""

STARTS = 8
"""Lanes from which an order is begun when the nearest is put next to each."""

STAGE_LANES = 10_000
"""Lanes tried in all in the search for a chain whose stages are all fast, which is repeated some ten times."""

SHORT_LANES = 10
"""Lanes of which all short chains are tried: 720 orders of three."""

REFINED_LANES = 8
"""A good chain of fewer lanes is compared with all chains of so many, the cheapest and nearest others among them."""

REFINE_STEPS = 30_000
"""Partial chains of the lanes of a good chain that are looked at, see `search.SEARCH_STEPS`."""

IMPROVED = 2
"""Chains that are improved, the best of those that were found."""

ROUNDS = 4
"""How often a chain is cut anew after its lanes were changed for better ones; it rarely changes after the second."""


def many_chain(task: Task, known: Chain, bounds: Bounds = ANY) -> Chain:
    """A good chain over any number of lanes, `known`, which keeps to the bounds, or better."""
    orders = (order for order in _orders(task) if len(order) <= ROUTE_HOPS)
    seeds = [chain for order in orders if (chain := _cut(task, order, bounds)) is not None]
    if not seeds or bounds.stage is not None:
        seeds.append(known)
    elif (short := short_chain(task)) is not None:
        seeds.append(short)
    seeds.sort(key=lambda chain: (task.cost(chain) or 0, chain))
    better = [_improved(task, chain, bounds) for chain in seeds[:IMPROVED]]
    best = min(better, key=lambda chain: (task.cost(chain) or 0, chain))
    return _refined(task, best, bounds)


def short_chain(task: Task) -> Chain | None:
    """The cheapest chain of one to three of the best lanes whose spans end where a lane is full; None where they do not
    hold all layers.

    Most models are held by few, and then the hops decide: all orders are tried.
    """
    ranked = sorted(range(len(task.lanes)), key=lambda i: (task.lanes[i].price, i))
    able = [i for i in ranked if 3 * _most_work(task, task.lanes[i]) >= task.done[-1] // 2][:SHORT_LANES]
    backs = {i: back_of(task.lanes[i].reach) for i in able}
    best: tuple[int, Chain] | None = None
    for count in range(max(1, task.fewest), 4):
        for order in permutations(able, count):
            for chain in _full_cuts(task, order, backs):
                cost = task.cost(chain)
                if cost is not None and (best is None or (cost, chain) < best):
                    best = cost, chain
    return None if best is None else best[1]


def _full_cuts(task: Task, order: Sequence[int], backs: Mapping[int, Sequence[int]]) -> Iterator[Chain]:
    """The cuts for one to three lanes where all but one are full, or the one in the middle is a bridge of one layer
    between two that are far from each other."""
    reach = task.lanes[order[0]].reach[0]
    back = backs[order[-1]][task.layers]
    ways: list[tuple[int, ...]] = [()]
    if len(order) == 2:
        ways = [(reach,), (back,)]
    elif len(order) == 3:
        ways = [
            (reach, task.lanes[order[1]].reach[reach]),
            (reach, back),
            (backs[order[1]][back], back),
            (reach, reach + 1),
            (back - 1, back),
        ]
    for inner in ways:
        edges = (0, *inner, task.layers)
        if all(one < other for one, other in pairwise(edges)):
            spans = (Span(one, other) for one, other in pairwise(edges))
            chain = tuple(Link(lane, span) for lane, span in zip(order, spans, strict=True))
            if all(task.lanes[link.lane].fits(link.span) for link in chain):
                yield chain


def _refined(task: Task, best: Chain, bounds: Bounds) -> Chain:
    """The best chain over the lanes of a good one and some more, where all of those can be compared."""
    chosen = {link.lane for link in best}
    if len(chosen) > EXACT_LANES:
        return best

    def distance(lane: int) -> tuple[int, int]:
        hops = [hop for other in chosen if (hop := task.hops[other][lane]) is not None]
        return task.lanes[lane].price * task.done[-1] + len(chosen) * min(hops, default=0), lane

    able = (
        i
        for i, lane in enumerate(task.lanes)
        if i not in chosen and any(map(int.__gt__, lane.reach, range(task.layers)))
    )
    spare = sorted(able, key=distance)[: max(0, REFINED_LANES - len(chosen))]
    among = sorted((*chosen, *spare))
    found = exact_chain(task.among(among), replace(bounds, cost=task.cost(best)), REFINE_STEPS)
    return best if found is None else tuple(Link(among[link.lane], link.span) for link in found)


def any_chain(task: Task) -> Chain | None:
    """Some chain of few full lanes, whatever it costs; None where none was found."""
    most = sorted((_most_work(task, lane) for lane in task.lanes), reverse=True)
    if sum(most[:ROUTE_HOPS]) < task.done[-1]:
        return None
    return greedy_chain(task) or packed_chain(task, None, BEAM_LANES)


def brisk_chain(task: Task, stage: int | None) -> Chain | None:
    """Some chain whose stages all keep to `stage`; None where none was found."""
    tries = STAGE_LANES // min(len(task.lanes), task.layers, ROUTE_HOPS)
    chain = greedy_chain(task, stage)
    # A beam of one or two chains finds no more than the greedy one does.
    return chain or (packed_chain(task, stage, tries) if tries > 2 * len(task.lanes) else None)


def greedy_chain(task: Task, stage: int | None = None) -> Chain | None:
    """Always the lane that goes farthest next, then the cheapest: few lanes, each as full as it may be."""
    twin, links = twins(task), list[Link]()
    unused = list(range(len(task.lanes)))
    at, before = 0, None
    while at < task.layers:
        if len(links) == ROUTE_HOPS:
            return None
        top = task.layers - max(0, task.fewest - len(links) - 1)
        best: tuple[int, int, int] | None = None
        tried: set[int] = set()
        for lane in unused:
            hop = task.into(before, lane)
            if hop is None or twin[lane] in tried:
                continue
            tried.add(twin[lane])
            last = min(filled(task, lane, at, hop, stage), top)
            if last == task.layers and task.exit[lane] is None:
                last -= 1
            if last > at:
                way = (-last, task.lanes[lane].price, lane)
                best = way if best is None else min(best, way)
        if best is None:
            return None
        links.append(Link(best[2], Span(at, -best[0])))
        unused.remove(best[2])
        at, before = -best[0], best[2]
    return tuple(links)


def _most_work(task: Task, lane: Lane, stage: int | None = None) -> int:
    """The most work that a lane has room and time for anywhere."""
    most = max(task.done[last] - task.done[first] for first, last in enumerate(lane.reach))
    most = max([most, *(task.done[span.last] - task.done[span.first] for span in lane.held)])
    return most if stage is None else min(most, stage // max(1, lane.price))


# ── which lanes, and in which order ─────────────────────────────────────────────────────────────────────────
def _orders(task: Task) -> Iterator[tuple[int, ...]]:
    """Orders worth being cut, each another set of lanes or another order of it."""
    seen: set[tuple[int, ...]] = set()
    rooms = [_room_anywhere(lane) for lane in task.lanes]
    for anchor in _anchors(task):
        chosen = chosen_lanes(task, rooms, anchor)
        if not chosen:
            continue
        chosen = _enough(task, rooms, chosen)
        for order in (_nearest(task, chosen), chosen):
            if order not in seen:
                seen.add(order)
                yield order


def _anchors(task: Task) -> list[int]:
    """Cheap lanes that are far from each other."""
    near = 2 * least_hop(hop for i, row in enumerate(task.hops) for j, hop in enumerate(row) if i != j)
    found: list[int] = []
    for lane in sorted(range(len(task.lanes)), key=lambda i: (task.lanes[i].price, i)):
        ways = [task.hops[other][lane] for other in found]
        if all(hop is None or hop > near for hop in ways):
            found.append(lane)
        if len(found) == ANCHORS:
            break
    return found


def _enough(task: Task, rooms: Sequence[int], chosen: tuple[int, ...]) -> tuple[int, ...]:
    """With the cheapest others where a chain needs more lanes than it would take."""
    able = (i for i, room in enumerate(rooms) if room and i not in chosen)
    spare = sorted(able, key=lambda i: (task.lanes[i].price, i))
    return (*chosen, *spare[: max(0, task.fewest - len(chosen))])


def chosen_lanes(task: Task, rooms: Sequence[int], anchor: int) -> tuple[int, ...]:
    """Good lanes out of many, as indices in order of price; empty where this rough view of them finds none.

    Each lane counts as the number of layers that fit wherever they lie (`rooms`), all layers as equal work, and a hop
    as what it costs from the anchor. Then order does not matter, and in a best choice all lanes but the dearest are
    full: a knapsack, exact for equal layers and hops.
    """
    layers, work = task.layers, max(1, task.done[-1])
    ranked = sorted(
        (i for i in range(len(rooms)) if rooms[i]), key=lambda i: (task.lanes[i].price, -rooms[i], i)
    )
    best: list[tuple[int, tuple[int, ...]] | None] = [(0, ())] + [None] * (layers - 1)
    found: tuple[int, tuple[int, ...]] | None = None
    for i in ranked:
        hop = task.entry[anchor] if i == anchor else task.hops[anchor][i]
        if hop is None:
            continue
        for full in range(layers - 1, -1, -1):  # downwards, so that a lane is taken once
            before = best[full]
            if before is None:
                continue
            taken = min(rooms[i], layers - full)
            cost = before[0] + hop * layers // work + task.lanes[i].price * taken
            then = found if full + taken == layers else best[full + taken]
            if then is not None and then[0] < cost:
                continue
            way = (cost, (*before[1], i))
            way = way if then is None else min(then, way)
            if full + taken == layers:
                found = way
            else:
                best[full + taken] = way
    return () if found is None else found[1]


def _room_anywhere(lane: Lane) -> int:
    """How many neighbouring layers fit wherever they begin."""
    return min(
        (last - first for first, last in enumerate(lane.reach) if last < lane.layers), default=lane.layers
    )


def _nearest(task: Task, lanes: Sequence[int]) -> tuple[int, ...]:
    """The lanes in an order of short hops: each is followed by the nearest of those left."""
    orders = [_from(task, lanes, start) for start in lanes[:STARTS]]
    return min(orders, key=lambda order: (_way_length(task, order), order))


def _from(task: Task, lanes: Sequence[int], start: int) -> tuple[int, ...]:
    order, left = [start], [lane for lane in lanes if lane != start]
    while left:
        row = task.hops[order[-1]]
        nearest = min(left, key=lambda lane: ((hop := row[lane]) is None, hop or 0))
        order.append(nearest)
        left.remove(nearest)
    return tuple(order)


def _way_length(task: Task, order: Sequence[int]) -> tuple[int, int]:
    """How many forbidden hops, and what the others cost."""
    hops = [task.hops[one][other] for one, other in pairwise(order)]
    return sum(hop is None for hop in hops), sum(hop or 0 for hop in hops)


def packed_chain(task: Task, stage: int | None, tries: int) -> Chain | None:
    """A chain that holds all layers though it is tight, in memory or in what a stage may take; None where none was
    found.

    A beam search: chains grow by one full lane at a time, and those go on whose lanes were filled best. At each step
    so many lanes are tried in all, so that its width falls with the number of lanes.
    """
    done, twin = task.done, twins(task)
    most = [_most_work(task, lane, stage) for lane in task.lanes]
    beam: list[_Packed] = [(0, 0, (), 0)]
    for count in range(1, min(len(task.lanes), ROUTE_HOPS) + 1):
        ways: dict[tuple[int, int], _Packed] = {}
        for waste, at, links, used in beam:
            before = links[-1].lane if links else None
            for lane, hop in _untried(task, twin, before, used):
                last = filled(task, lane, at, hop, stage)
                if last == at or (last == task.layers and task.exit[lane] is None):
                    continue
                way = (*links, Link(lane, Span(at, last)))
                if last < task.layers:
                    bits = used | 1 << lane
                    then = (waste + most[lane] - (done[last] - done[at]), last, way, bits)
                    ways[bits, lane] = min(then, ways.get((bits, lane), then))
                elif count >= task.fewest:
                    return way
        beam = sorted(ways.values())[: max(2, tries // len(task.lanes))]
    return None


_Packed = tuple[int, int, Chain, int]
"""Work that lanes could have done and do not, layers done, the chain, and its lanes as a bit mask."""


def _untried(task: Task, twin: Sequence[int], before: int | None, used: int) -> Iterator[tuple[int, int]]:
    """Lanes that may come next, one of each kind, and the hops to them."""
    tried: set[int] = set()
    for lane, hop in enumerate(task.entry if before is None else task.hops[before]):
        if hop is not None and not used >> lane & 1 and twin[lane] not in tried:
            tried.add(twin[lane])
            yield lane, hop


# ── changing lanes of a chain for better ones ───────────────────────────────────────────────────────────────
def _cut(task: Task, order: Sequence[int], bounds: Bounds) -> Chain | None:
    return cut(task, order, lambda lane, span: 0, bounds) if order else None


def _improved(task: Task, chain: Chain, bounds: Bounds) -> Chain:
    """The chain after other lanes, and lanes in each other's places, were tried, and cuts after that."""
    for _ in range(ROUNDS):
        changed = _Exchange(task, chain, bounds).run()
        again = _cut(task, [link.lane for link in changed], bounds) or changed
        if (task.cost(again) or 0) >= (task.cost(chain) or 0):
            break
        chain = again
    return chain


class _Exchange:
    """One round of exchanges: the spans stay, and each gets the lane that is best there in turn."""

    def __init__(self, task: Task, chain: Chain, bounds: Bounds) -> None:
        self._task = task
        self._limit = bounds.stage
        self._spans = [link.span for link in chain]
        self._lanes = [link.lane for link in chain]
        self._work = [task.done[span.last] - task.done[span.first] for span in self._spans]
        self._unused = sorted(set(range(len(task.lanes))) - set(self._lanes))

    def run(self) -> Chain:
        for place in range(len(self._lanes)):
            self._replace(place)
            for other in range(place + 1, len(self._lanes)):
                self._swap(place, other)
        return tuple(Link(lane, span) for lane, span in zip(self._lanes, self._spans, strict=True))

    def _replace(self, place: int) -> None:
        now = self._lanes[place]
        best = self._cost((place,)), now
        for lane in self._unused:
            if self._task.lanes[lane].fits(self._spans[place]):
                self._lanes[place] = lane
                cost = self._cost((place,))
                if cost is not None and (best[0] is None or cost < best[0]):
                    best = cost, lane
        self._lanes[place] = best[1]
        if best[1] != now:
            self._unused = sorted({*self._unused, now} - {best[1]})

    def _swap(self, place: int, other: int) -> None:
        lanes, spans = self._lanes, self._spans
        fits = self._task.lanes[lanes[place]].fits(spans[other])
        if not fits or not self._task.lanes[lanes[other]].fits(spans[place]):
            return
        before = self._cost((place, other))
        lanes[place], lanes[other] = lanes[other], lanes[place]
        after = self._cost((place, other))
        if after is None or (before is not None and after >= before):
            lanes[place], lanes[other] = lanes[other], lanes[place]

    def _cost(self, places: tuple[int, ...]) -> int | None:
        """What the stages at some places, and those after them, cost; None where one may not be."""
        total = 0
        for touched in {place + step for place in places for step in (0, 1)}:
            stage = self._stage(touched)
            if stage is None:
                return None
            total += stage
        return total

    def _stage(self, place: int) -> int | None:
        task, lanes = self._task, self._lanes
        if place == len(lanes):
            return task.exit[lanes[-1]]
        hop = task.into(lanes[place - 1] if place else None, lanes[place])
        if hop is None:
            return None
        stage = hop + task.lanes[lanes[place]].price * self._work[place]
        return stage if self._limit is None or stage <= self._limit else None
