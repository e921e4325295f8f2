"""Why there can be no plan, with the figures, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshinfer.limits import MIB
from meshinfer.mesh.rooms import Candidate, Room, Table
from meshinfer.values import PeerId, Precision, Span

NAMED_PEERS = 8
"""A sentence names so many peers, those with the most memory first, and counts the others."""

NAMED_LINKS = 3
"""And so many pairs of them."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No plan: what the model needs (layers, and KV for one long question) and what each peer has free, in bytes.

    `refused` are the peers whose devices cannot allocate the largest layer in one piece, with what they can. `broken`
    are the pairs that no route may join, where memory alone would seem to be enough.
    """

    needed_bytes: int
    largest_layer_bytes: int
    available: tuple[tuple[PeerId, int], ...]
    refused: tuple[tuple[PeerId, int], ...] = ()
    broken: tuple[tuple[PeerId, PeerId], ...] = ()

    def sentence(self, names: Mapping[PeerId, str]) -> str:
        """For a person: needed, available by peer, and what would help."""
        most = sorted(self.available, key=lambda have: (-have[1], have[0]))
        have = [f"{names.get(peer, peer)} has {_mib(free)}" for peer, free in most[:NAMED_PEERS]]
        if len(most) > NAMED_PEERS:
            rest = sum(free for _, free in most[NAMED_PEERS:])
            have.append(f"{len(most) - NAMED_PEERS} more have {_mib(rest)} in all")
        needed = _mib(self.needed_bytes, up=True)
        parts = [f"needs {needed} for layers and KV", ", ".join(have) or "no peer gives any"]
        parts += [*self._refusals(names), self._remedy(names)]
        return "; ".join(parts)

    def _refusals(self, names: Mapping[PeerId, str]) -> list[str]:
        shown = [
            f"{names.get(peer, peer)}'s device takes no more than {_mib(size)} in one piece"
            for peer, size in self.refused[:NAMED_PEERS]
        ]
        more = len(self.refused) - len(shown)
        return [*shown, *([f"{more} more devices take too little in one piece"] if more else [])]

    def _remedy(self, names: Mapping[PeerId, str]) -> str:
        if self.broken:
            return self._links(names)
        largest = max((free for _, free in self.available), default=0)
        if largest < self.largest_layer_bytes:
            layer = _mib(self.largest_layer_bytes, up=True)
            return f"one layer alone takes {layer}, so a PC needs a larger [sharing] memory"
        # Memory in pieces may be enough in sum and yet hold no plan: then one more PC is a first guess.
        refused = {peer for peer, _ in self.refused}
        useful = sum(
            free for peer, free in self.available if free >= self.largest_layer_bytes and peer not in refused
        )
        more = max(1, -(-(self.needed_bytes - useful) // largest))
        return f"at least {more} more PC{'s' if more > 1 else ''} or a larger [sharing] memory is needed"

    def _links(self, names: Mapping[PeerId, str]) -> str:
        pairs = [
            f"{names.get(one, one)} and {names.get(other, other)}" for one, other in self.broken[:NAMED_LINKS]
        ]
        more = len(self.broken) - len(pairs)
        tail = f", and {more} more links" if more > 0 else ""
        return f"the links between {', between '.join(pairs)}{tail} failed lately, and there is no way around them"


def shortfall(
    table: Table, rooms: Sequence[Room], broken: tuple[tuple[PeerId, PeerId], ...] = ()
) -> Shortfall:
    """Needs are counted as the thriftiest of the peers would have them. `broken` are the pairs but for which there
    would be a plan."""
    candidates = [room.candidate for room in rooms]
    layers, whole = range(table.facts.layers), Span(0, table.facts.layers)
    thrifty = min(candidates, key=lambda one: table.bytes_of(one, whole), default=_NOBODY)
    free = [(room.candidate.peer, max(0, room.free_bytes)) for room in rooms if room.candidate.capacity_bytes]
    refused = [
        (one.peer, one.allocation_bytes)
        for one in candidates
        if one.allocation_bytes
        and max(table.buffer_bytes(one, layer) for layer in layers) > one.allocation_bytes
    ]
    largest = max(table.bytes_of(thrifty, Span(layer, layer + 1)) for layer in layers)
    return Shortfall(table.bytes_of(thrifty, whole), largest, tuple(free), tuple(refused), broken)


def _mib(size_bytes: int, up: bool = False) -> str:
    """Needs are rounded up and what is there down, so that the figures never seem to fit when they do not."""
    return f"{-(-size_bytes // MIB) if up else size_bytes // MIB} MiB"


_NOBODY = Candidate(PeerId(""), 0, 0, 0, 0, 0, Precision.AUTO, "CPU")
