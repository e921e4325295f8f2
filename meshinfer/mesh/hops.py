"""What it costs to pass rows from peer to peer, and where no route may lead, as the peers themselves say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshinfer.values import Advert, PeerId

HOP_US = 500
"""One hop where the link was not measured: a round trip of 8 kB over ZeroMQ with CURVE takes about 150 µs on loopback,
a further inference call about 300 µs (both measured)."""

SOFTWARE_US = 400
"""What a hop takes besides the network, so that one on loopback comes to `HOP_US`."""

ROW_BYTES_PER_NUMBER = 4
"""Hidden states travel as f32 at most."""


@dataclass(frozen=True, slots=True)
class Hops:
    """What it costs to pass one token's rows from owner to owner.

    `us` holds what was measured, in µs, by (from, to); all other pairs cost `HOP_US`. The pairs in `broken` (in either
    order) are never neighbours on a route.
    """

    us: Mapping[tuple[PeerId, PeerId], int] = field(default_factory=lambda: MappingProxyType({}))
    broken: frozenset[tuple[PeerId, PeerId]] = frozenset()

    @classmethod
    def of(cls, adverts: Iterable[Advert], hidden: int) -> Hops:
        """From what peers say of their links, for rows of a model of this width."""
        us: dict[tuple[PeerId, PeerId], int] = {}
        broken: set[tuple[PeerId, PeerId]] = set()
        row_bits = hidden * ROW_BYTES_PER_NUMBER * 8
        for advert in adverts:
            broken.update((advert.peer, other) for other in advert.broken)
            for link in advert.links:
                if link.round_trip_us <= 0:
                    continue
                # kbit/s are bits per ms.
                transfer_us = row_bits * 1000 // link.kbit_s if link.kbit_s > 0 else 0
                hop_us = link.round_trip_us // 2 + transfer_us + SOFTWARE_US
                # Both ends measure the same link; the more careful of the two counts for both directions.
                pair, back = (advert.peer, link.peer), (link.peer, advert.peer)
                if us.get(pair, 0) < hop_us:
                    us[pair] = us[back] = hop_us
        return cls(us, frozenset(broken))

    def between(self, one: PeerId, other: PeerId) -> int | None:
        """None where no route may lead from the one to the other."""
        if (one, other) in self.broken or (other, one) in self.broken:
            return None
        return self.us.get((one, other), HOP_US)

    def broken_among(self, peers: Iterable[PeerId]) -> tuple[tuple[PeerId, PeerId], ...]:
        """The pairs of these peers that no route may join, each once, in order."""
        here = set(peers)
        pairs = ((one, other) for one, other in self.broken if one in here and other in here)
        return tuple(sorted({(min(pair), max(pair)) for pair in pairs}))

    def matrix(self, peers: tuple[PeerId, ...], unit: int) -> tuple[tuple[int | None, ...], ...]:
        """All of them from each peer to each, times `unit`."""
        numbers = {peer: i for i, peer in enumerate(peers)}
        rows: list[list[int | None]] = [[HOP_US * unit] * len(peers) for _ in peers]
        for (one, other), hop_us in self.us.items():
            if one in numbers and other in numbers:
                rows[numbers[one]][numbers[other]] = hop_us * unit
        for one, other in self.broken:
            if one in numbers and other in numbers:
                rows[numbers[one]][numbers[other]] = rows[numbers[other]][numbers[one]] = None
        return tuple(map(tuple, rows))
