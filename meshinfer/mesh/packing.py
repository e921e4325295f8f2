"""The search behind placement, for many lanes: good chains in bounded time, where all of them cannot be tried.

Lanes are first chosen as if layers were alike and order did not matter, then put in order, cut, and changed for better
ones as long as that helps. All counts are bounded, so that agents on slow PCs find the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meshinfer.limits import ROUTE_HOPS
from meshinfer.mesh.lanes import ANY, Bounds, Chain, Lane, Link, Task, cut, filled, least_hop, twins
from meshinfer.mesh.search import EXACT_LANES, STAGE_BITS, exact_chain
from meshinfer.values import Span

BEAM_LANES = 2520
"""Lanes tried at each step of the search for a tight fit, over all the chains that it keeps. With ten lanes
these are 252 chains, as many as there are sets of five: then it misses nothing."""

ANCHORS = 4
"""Lanes around which others are gathered by how near they are: one for each site of a mesh over several."""

STARTS = 8
"""Lanes from which an order is begun when the nearest is put next to each."""

IMPROVED = 2
"""Chains that are improved, the best of those that were found."""

ROUNDS = 4
"""How often a chain is cut anew after its lanes were changed for better ones; it rarely changes after the second."""


def many_chain(task: Task, bounds: Bounds = ANY) -> Chain | None:
    """A good chain over any number of lanes; None where none was found."""
    seeds = [chain for order in _orders(task) if (chain := _cut(task, order, bounds)) is not None]
    if bounds.stage is not None and (greedy := greedy_chain(task, bounds.stage)) is not None:
        seeds.append(greedy)
    if not seeds and (packed := _cut(task, packed_lanes(task), bounds)) is not None:
        seeds.append(packed)
    seeds.sort(key=lambda chain: (task.cost(chain) or 0, chain))
    better = [_improved(task, chain, bounds) for chain in seeds[:IMPROVED]]
    best = min(better, key=lambda chain: (task.cost(chain) or 0, chain), default=None)
    if best is None or len(best) > min(EXACT_LANES, len(task.lanes) - 1):
        return best
    chosen = sorted(link.lane for link in best)
    found = exact_chain(task.among(chosen), bounds)
    return best if found is None else tuple(Link(chosen[link.lane], link.span) for link in found)


def many_least_stage(task: Task) -> int | None:
    """As `search.least_stage`, for many lanes: not the least, but near it."""
    chain = greedy_chain(task) or _cut(task, packed_lanes(task), ANY)
    if chain is None:
        return None
    high, low = max(task.stages(chain) or (0,)), 0
    while high - low > high >> STAGE_BITS:
        middle = (low + high) // 2
        chain = greedy_chain(task, middle)
        if chain is None:
            low = middle
        else:
            high = max(task.stages(chain) or (0,))
    return high


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


# ── which lanes, and in which order ─────────────────────────────────────────────────────────────────────────
def _orders(task: Task) -> Iterator[tuple[int, ...]]:
    """Orders worth being cut, each another set of lanes or another order of it."""
    seen: set[tuple[int, ...]] = set()
    for anchor in _anchors(task):
        chosen = chosen_lanes(task, anchor)
        if not chosen:
            continue
        chosen = _enough(task, chosen)
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


def _enough(task: Task, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """With the cheapest others where a chain needs more lanes than it would take."""
    able = (i for i, lane in enumerate(task.lanes) if i not in chosen and _room_anywhere(lane))
    spare = sorted(able, key=lambda i: (task.lanes[i].price, i))
    return (*chosen, *spare[: max(0, task.fewest - len(chosen))])


def chosen_lanes(task: Task, anchor: int) -> tuple[int, ...]:
    """Good lanes out of many, as indices in order of price; empty where this rough view of them finds none.

    Each lane counts as the number of layers that fit wherever they lie, all layers as equal work, and a hop as what it
    costs from the anchor. Then order does not matter, and in a best choice all lanes but the dearest are full: a
    knapsack, exact for equal layers and hops.
    """
    layers, work = task.layers, max(1, task.done[-1])
    rooms = [_room_anywhere(lane) for lane in task.lanes]
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
    hops = [task.hops[one][other] for one, other in itertools.pairwise(order)]
    return sum(hop is None for hop in hops), sum(hop or 0 for hop in hops)


def packed_lanes(task: Task) -> tuple[int, ...]:
    """Lanes that hold all layers though it is tight, in order of layers; empty where none were found.

    A beam search: chains grow by one full lane at a time, and those go on whose lanes were filled best. Its
    width falls with the number of lanes, so that a step takes the same time (a few ms) for many.
    """
    done, twin, count = task.done, twins(task), len(task.lanes)
    most = [max(done[last] - done[first] for first, last in enumerate(lane.reach)) for lane in task.lanes]
    beam: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())] if sum(most) >= done[-1] else []
    while beam:
        ways: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for waste, at, order in beam:
            for lane in _untried(task, twin, order):
                last = task.lanes[lane].reach[at]
                if last == at or (last == task.layers and task.exit[lane] is None):
                    continue
                if last == task.layers and len(order) + 1 >= task.fewest:
                    return (*order, lane)
                way = (waste + most[lane] - (done[last] - done[at]), last, (*order, lane))
                used = sum(1 << one for one in way[2])
                ways[used] = min(way, ways.get(used, way))
        beam = sorted(way for way in ways.values() if way[1] < task.layers)[: max(8, BEAM_LANES // count)]
    return ()


def _untried(task: Task, twin: Sequence[int], order: tuple[int, ...]) -> Iterator[int]:
    """Lanes that may come next, one of each kind."""
    tried: set[int] = set()
    before = order[-1] if order else None
    for lane in range(len(task.lanes)):
        if lane not in order and twin[lane] not in tried and task.into(before, lane) is not None:
            tried.add(twin[lane])
            yield lane


# ── changing lanes of a chain for better ones ───────────────────────────────────────────────────────────────
def _cut(task: Task, order: Sequence[int], bounds: Bounds) -> Chain | None:
    return cut(task, order, lambda lane, span: 0, bounds) if order else None


def _improved(task: Task, chain: Chain, bounds: Bounds) -> Chain:
    """The chain after other lanes, and lanes in each other's places, were tried, and cuts after that."""
    for _ in range(ROUNDS):
        changed = _exchanged(task, chain, bounds)
        again = _cut(task, [link.lane for link in changed], bounds) or changed
        if (task.cost(again) or 0) >= (task.cost(chain) or 0):
            break
        chain = again
    return chain


def _exchanged(task: Task, chain: Chain, bounds: Bounds) -> Chain:
    """Each place in turn gets the lane that is best there, from those unused and from the other places."""
    links = list(chain)
    for place in range(len(links)):
        unused = sorted(set(range(len(task.lanes))) - {link.lane for link in links})
        here = _around(task, links, (place,), bounds)
        ways = [_put(links, place, lane) for lane in unused if task.lanes[lane].fits(links[place].span)]
        priced = [(cost, way) for way in ways if (cost := _around(task, way, (place,), bounds)) is not None]
        if priced and here is not None and min(priced)[0] < here:
            links = min(priced)[1]
        for other in range(place + 1, len(links)):
            here = _around(task, links, (place, other), bounds)
            way = _put(_put(links, place, links[other].lane), other, links[place].lane)
            there = _around(task, way, (place, other), bounds)
            if there is not None and (here is None or there < here):
                links = way
    return tuple(links)


def _put(links: Sequence[Link], place: int, lane: int) -> list[Link]:
    way = list(links)
    way[place] = Link(lane, way[place].span)
    return way


def _around(task: Task, links: Sequence[Link], places: Sequence[int], bounds: Bounds) -> int | None:
    """What the stages at some places, and those after them, cost; None where one does not fit."""
    cost = 0
    touched = sorted({place + step for place in places for step in (0, 1)})
    for place in touched:
        last = links[place - 1].lane if place else None
        if place == len(links):
            hop = task.exit[links[-1].lane]
            stage = hop
        else:
            link = links[place]
            hop = task.into(last, link.lane)
            fits = task.lanes[link.lane].fits(link.span)
            stage = hop + task.compute(link) if fits and hop is not None else None
            if stage is not None and bounds.stage is not None and stage > bounds.stage:
                stage = None
        if stage is None:
            return None
        cost += stage
    return cost
