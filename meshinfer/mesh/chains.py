"""The best chain for an objective; and of those that are nearly as good, the one that leaves most where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshinfer.limits import ROUTE_HOPS
from meshinfer.mesh.lanes import ANY, Bounds, Chain, Hop, Lane, Link, Task
from meshinfer.mesh.packing import any_chain, brisk_chain, many_chain
from meshinfer.mesh.search import EXACT_LANES, exact_chain
from meshinfer.mesh.stages import covered, least_stage
from meshinfer.values import Objective, Span

SLACK_PERCENT = 20
"""What a chain may be worse than the best one for leaving spans where they are loaded."""

REPAIR_STEPS = 10_000
"""Partial chains that may be looked at for one gap, see `search.SEARCH_STEPS`."""


def best_chain(task: Task, objective: Objective) -> Chain | None:
    """The chain that costs least, or the one whose slowest stage takes least and then costs least; None where none
    holds all layers. Exact for up to `EXACT_LANES` lanes (unless the search is given up, see there), good beyond."""
    few = len(task.lanes) <= EXACT_LANES
    cover = covered if few else brisk_chain
    known = covered(task) if few else any_chain(task)
    if known is None:
        return None
    bounds = ANY
    if objective is Objective.THROUGHPUT:
        known = least_stage(task, cover, known)
        bounds = Bounds(stage=max(task.stages(known) or (0,)))
    return (exact_chain(task, bounds) if few else None) or many_chain(task, known, bounds)


def calm_chain(task: Task, objective: Objective, best: Chain, earlier: Chain) -> Chain:
    """Of the chains that are at most `SLACK_PERCENT` worse than the best one, that which moves the fewest bytes.

    `earlier` are those links of a chain that ran which still can run. For few lanes all chains are compared; for many,
    or where that is given up, those that leave the earlier links alone and fill the gaps between them.
    """
    if not task.moved(best):
        return best
    bounds = _near(task, objective, best)
    found = [best]
    few = exact_chain(task, bounds) if len(task.lanes) <= EXACT_LANES else None
    found += [few] if few else _repairs(task, bounds, earlier)
    return min(found, key=lambda chain: (task.moved(chain), task.cost(chain) or 0, chain))


def _near(task: Task, objective: Objective, best: Chain) -> Bounds:
    if objective is Objective.THROUGHPUT:
        slowest = max(task.stages(best) or (0,))
        return Bounds(stage=slowest * (100 + SLACK_PERCENT) // 100, still=True)
    return Bounds(cost=(task.cost(best) or 0) * (100 + SLACK_PERCENT) // 100, still=True)


def _keeps(task: Task, chain: Chain, bounds: Bounds) -> bool:
    stages, cost = task.stages(chain), task.cost(chain)
    if stages is None or cost is None or not task.fewest <= len(chain) <= ROUTE_HOPS:
        return False
    return (bounds.stage is None or max(stages) <= bounds.stage) and (
        bounds.cost is None or cost <= bounds.cost
    )


# ── filling gaps ────────────────────────────────────────────────────────────────────────────────────────────
def _repairs(task: Task, bounds: Bounds, earlier: Chain) -> list[Chain]:
    """Chains within the bounds that leave earlier links alone: all of them, or all but the neighbours of gaps."""
    found = []
    for links in _variants(task, earlier):
        for still in (True, False):
            chain = _filled(task, replace(bounds, still=still), links)
            if chain is not None and _keeps(task, chain, bounds):
                found.append(chain)
                break
    return found


def _variants(task: Task, earlier: Chain) -> Iterator[Chain]:
    """The earlier links; without those that follow a gap; without those before one; without both."""
    firsts = {0, *(link.span.last for link in earlier)}
    lasts = {task.layers, *(link.span.first for link in earlier)}
    after = {link for link in earlier if link.span.first not in firsts}
    before = {link for link in earlier if link.span.last not in lasts}
    for dropped in (set[Link](), after, before, after | before):
        yield tuple(link for link in earlier if link not in dropped)


def _filled(task: Task, bounds: Bounds, links: Chain) -> Chain | None:
    """The links with the gaps between them filled by other lanes."""
    chain: list[Link] = []
    used = {link.lane for link in links}
    at = 0
    for link in (*links, None):
        end = task.layers if link is None else link.span.first
        if at < end:
            fill = _fill(task, bounds, Span(at, end), used, chain[-1] if chain else None, link)
            if fill is None:
                return None
            chain += fill
            used.update(one.lane for one in fill)
        if link is not None:
            chain.append(link)
            at = link.span.last
    return tuple(chain)


def _fill(
    task: Task, bounds: Bounds, gap: Span, used: set[int], before: Link | None, after: Link | None
) -> Chain | None:
    """Links for a gap between two others, or at an end."""
    free = [i for i in range(len(task.lanes)) if i not in used and any(_within(task.lanes[i], gap))]
    chosen = _likely(task, gap, free, before, after)
    if not chosen:
        return None
    entry = tuple(task.into(before.lane if before else None, i) for i in chosen)
    leave = tuple(_leaving(task, i, after, bounds) for i in chosen)
    part = replace(
        task.among(chosen),
        lanes=tuple(_cropped(task.lanes[i], gap) for i in chosen),
        done=task.done[gap.first : gap.last + 1],
        entry=entry,
        exit=leave,
        fewest=1,
    )
    inner = Bounds(stage=bounds.stage, still=bounds.still)
    found = exact_chain(part, inner, REPAIR_STEPS) or covered(part, bounds.stage)
    if found is None:
        return None
    return tuple(
        Link(chosen[one.lane], Span(one.span.first + gap.first, one.span.last + gap.first)) for one in found
    )


def _leaving(task: Task, lane: int, after: Link | None, bounds: Bounds) -> Hop:
    """The hop from a lane to what follows the gap; None where that would make its stage too slow."""
    if after is None:
        return task.exit[lane]
    hop = task.hops[lane][after.lane]
    if hop is not None and bounds.stage is not None and hop + task.compute(after) > bounds.stage:
        return None
    return hop


def _likely(
    task: Task, gap: Span, free: list[int], before: Link | None, after: Link | None
) -> tuple[int, ...]:
    """As many lanes as can be searched: those that hold something of the gap, then those that hold most of it, of
    these the nearest and fastest."""

    def rank(lane: int) -> tuple[bool, int, int, int]:
        one = task.lanes[lane]
        most = max(_within(one, gap))
        ends = (task.into(before.lane if before else None, lane), task.hops[lane][after.lane] if after else 0)
        hops = sum(hop or 0 for hop in ends)
        work = task.done[gap.last] - task.done[gap.first]
        holds = any(gap.first <= span.first and span.last <= gap.last for span in one.held)
        return not holds, -most, hops + one.price * work, lane

    return tuple(sorted(sorted(free, key=rank)[:EXACT_LANES]))


def _within(lane: Lane, gap: Span) -> list[int]:
    """How many layers of the gap fit, from each of its layers on."""
    held = [len(span) for span in lane.held if gap.first <= span.first and span.last <= gap.last]
    return [*(min(lane.reach[at], gap.last) - at for at in range(gap.first, gap.last)), *held]


def _cropped(lane: Lane, gap: Span) -> Lane:
    """A lane as it is for the layers of a gap, which are numbered anew."""
    return Lane(
        lane.price,
        tuple(min(last, gap.last) - gap.first for last in lane.reach[gap.first : gap.last + 1]),
        frozenset(
            Span(span.first - gap.first, span.last - gap.first)
            for span in lane.held
            if gap.first <= span.first and span.last <= gap.last
        ),
        lane.load[gap.first : gap.last + 1],
    )
