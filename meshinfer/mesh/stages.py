"""Whether any chain of few lanes holds all layers, and how fast its slowest stage can be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from meshinfer.mesh.lanes import Chain, Link, Task, filled, least_hop, twins
from meshinfer.values import Span

STAGE_BITS = 9
"""The slowest stage is minimised to one part in 2^9, 0.2 %: each further bit is one more pass over the sets of
lanes."""


def least_stage(task: Task, cover: Callable[[Task, int | None], Chain | None], known: Chain) -> Chain:
    """A chain whose slowest stage takes the least time, to one part in 2^`STAGE_BITS`, as far as `cover` finds chains
    that keep to a time; `known` is one to begin with."""
    best, low = known, _fluid_stage(task)
    while (high := _slowest(task, best)) - low > high >> STAGE_BITS:
        middle = (low + high) // 2
        chain = cover(task, middle)
        if chain is None:
            low = middle
        else:
            best = chain
    return best


def _slowest(task: Task, chain: Chain) -> int:
    return max(task.stages(chain) or (0,))


def _fluid_stage(task: Task) -> int:
    """A time that no chain's slowest stage is below: as if all lanes shared the work as it suits them, with no hops."""
    prices = sorted(max(1, lane.price) for lane in task.lanes)[: task.layers]
    scale = 1 << 20
    rate = sum(-(-scale * prices[0] // price) for price in prices)
    return task.done[-1] * prices[0] * scale // rate


def covered(task: Task, stage: int | None = None) -> Chain | None:
    """A chain whose stages all keep to `stage`; None where there is none.

    Exact, for at most `search.EXACT_LANES` lanes. For each set of lanes and the last of them, the layers that they can
    end at are found, from those of smaller sets.
    """
    return _Cover(task, stage).run()


_State = tuple[int, int | None]
"""A set of lanes (a bit mask), and the last of them."""


class _Cover:
    """Ends are bit masks too: bit `b` is set where layers [0, b) can be held."""

    def __init__(self, task: Task, stage: int | None) -> None:
        self._task = task
        self._stage = stage
        self._twin = twins(task)
        self._most = [self._most_work(i) for i in range(len(task.lanes))]
        self._hopeful: dict[int, int] = {}
        self._ends: dict[_State, int] = {(0, None): 1}
        self._fills: dict[tuple[int, int], tuple[list[int], int]] = {}

    def _most_work(self, lane: int) -> int:
        """The most work that a lane can do anywhere in the time."""
        task, one = self._task, self._task.lanes[lane]
        hop = least_hop([task.entry[lane], *(row[lane] for i, row in enumerate(task.hops) if i != lane)])
        lasts = (filled(task, lane, first, hop, self._stage) for first in range(task.layers + 1))
        most = max(task.done[last] - task.done[first] for first, last in enumerate(lasts))
        return max([most, *(task.done[span.last] - task.done[span.first] for span in one.held)])

    def run(self) -> Chain | None:
        front: list[_State] = [(0, None)]
        for count in range(1, len(self._task.lanes) + 1):
            then: dict[_State, None] = {}
            for used, before in front:
                for lane, ends in self._next(used, before):
                    state = (used | 1 << lane, lane)
                    self._ends[state] = self._ends.get(state, 0) | ends
                    then[state] = None
                    if count >= self._task.fewest and ends >> self._task.layers:
                        return self._chain(state)
            front = list(then)
        return None

    def _next(self, used: int, before: int | None) -> Iterator[tuple[int, int]]:
        """Lanes that may come next, of equal ones the first, and the ends that they bring."""
        task, tried = self._task, set[int]()
        starts = self._ends[used, before] & self._hope(used)
        if not starts:
            return
        for lane, hop in enumerate(task.entry if before is None else task.hops[before]):
            twin = self._twin[lane]
            if hop is not None and not used >> lane & 1 and twin not in tried:
                tried.add(twin)
                ends = self._onward(lane, hop, starts)
                if task.exit[lane] is None:
                    ends &= (1 << task.layers) - 1
                if ends:
                    yield lane, ends

    def _hope(self, used: int) -> int:
        """The layers (a bit mask) from which on the free lanes have room and time for all the work that is left."""
        known = self._hopeful.get(used)
        if known is None:
            free = sum(most for i, most in enumerate(self._most) if not used >> i & 1)
            least = bisect_left(self._task.done, self._task.done[-1] - free)
            known = self._hopeful[used] = (1 << self._task.layers) - (1 << least)
        return known

    def _onward(self, lane: int, hop: int, starts: int) -> int:
        """The ends of a lane's spans from these starts on."""
        fills, able = self._fill(lane, hop)
        ends, left = 0, starts & able
        while left:
            # From neighbouring starts, each of which has room for its first layer, all ends are reached up to the last
            # one's.
            first = (left & -left).bit_length() - 1
            run = left >> first
            last = first + ((run + 1) & ~run).bit_length() - 2
            ends |= (2 << fills[last]) - (2 << first)
            left &= -(2 << last)
        for span in self._task.lanes[lane].held:
            if starts >> span.first & 1 and self._in_time(lane, hop, span):
                ends |= 1 << span.last
        return ends

    def _in_time(self, lane: int, hop: int, span: Span) -> bool:
        return self._stage is None or hop + self._task.compute(Link(lane, span)) <= self._stage

    def _fill(self, lane: int, hop: int) -> tuple[list[int], int]:
        """How far the lane goes from each start on, and the starts (a bit mask) from which it does at all."""
        known = self._fills.get((lane, hop))
        if known is None:
            starts = range(self._task.layers)
            fills = [filled(self._task, lane, at, hop, self._stage) for at in starts]
            known = fills, sum(1 << at for at in starts if fills[at] > at)
            self._fills[lane, hop] = known
        return known

    def _chain(self, state: _State) -> Chain:
        links: list[Link] = []
        end = self._task.layers
        while state[1] is not None:
            state, link = self._before(state, end)
            links.append(link)
            end = link.span.first
        return tuple(reversed(links))

    def _before(self, state: _State, end: int) -> tuple[_State, Link]:
        """A state that leads to this one, and the last link of that."""
        lane = state[1]
        assert lane is not None
        used = state[0] ^ 1 << lane
        for other in (i for i in (*range(len(self._task.lanes)), None) if i is None or used >> i & 1):
            hop = self._task.into(other, lane)
            starts = self._ends.get((used, other), 0) & ((1 << end) - 1) if hop is not None else 0
            while starts and hop is not None:
                first = starts.bit_length() - 1
                if self._onward(lane, hop, 1 << first) >> end & 1:
                    return (used, other), Link(lane, Span(first, end))
                starts ^= 1 << first
        raise AssertionError("a state that nothing leads to")
