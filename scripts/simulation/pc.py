"""A PC of the simulated office: what it is made of, and the agent that runs on it, if one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from meshinfer.values import Advert, Holding, ModelId, Objective, PeerId, Ports, Precision

if TYPE_CHECKING:
    from simulation.process import Process

RULES = 1
"""All simulated agents are of one program version."""


def peer_id(number: int) -> PeerId:
    """Spread like the hash of a key, since allocation groups peers by the bits of their ids."""
    return PeerId(sha256(b"%d" % number).hexdigest()[:32])


@dataclass(slots=True, eq=False)
class Pc:
    """`wall_s` is its clock on the wall, which nobody sets right. `load_s` is how long one layer takes to load.

    `disk_full`: no load succeeds. `stubborn`: its agent sends heartbeats and adverts, and accepts no plan. `forging`:
    it does the same, and names others in plans that nobody computed.
    """

    number: int
    capacity_bytes: int
    decode_us: int = 0
    holdings: tuple[Holding, ...] = ()
    wants: ModelId | None = None
    min_owners: int = 1
    objective: Objective = Objective.LATENCY
    precision: Precision = Precision.AUTO
    device: str = "CPU"
    allocation_bytes: int = 0
    load_s: float = 0.1
    true_decode_us: int = 200
    disk_full: bool = False
    stubborn: bool = False
    forging: bool = False
    wall_s: float = 1_700_000_000.0
    contact: Pc | None = None
    """Where multicast does not reach: the one peer that is in its configuration."""
    process: Process | None = None
    incarnation: int = 0
    sides: dict[int, int] = field(default_factory=dict)
    side: tuple[tuple[int, int], ...] = ()
    """Which side of each split it is on: only those with equal ones reach each other."""
    faults: int = 0
    calm_since: float = 0.0
    peer: PeerId = field(init=False)

    def __post_init__(self) -> None:
        self.peer = peer_id(self.number)

    @property
    def name(self) -> str:
        return f"pc{self.number}"

    @property
    def running(self) -> bool:
        """Whether an agent runs here that can answer."""
        return self.process is not None and not self.process.frozen

    def next_incarnation(self, now: float) -> None:
        """What an agent that starts takes: its clock in ms. Where that was set back, its former life had more."""
        self.incarnation = int((self.wall_s + now) * 1000)

    def portrait(self) -> Advert:
        """What its agent says of it."""
        return Advert(
            peer=self.peer,
            name=self.name,
            incarnation=self.incarnation,
            version=0,
            addresses=(f"10.0.{self.number // 250}.{self.number % 250}",),
            ports=Ports(29470, 29471, 29472, 29473),
            program="simulated",
            rules=RULES,
            device=self.device,
            precision=self.precision,
            capacity_bytes=self.capacity_bytes,
            allocation_bytes=self.allocation_bytes,
            decode_us=self.decode_us,
            prefill_us=self.decode_us // 20,
            holdings=self.holdings,
            wants=self.wants,
            min_owners=self.min_owners,
            objective=self.objective,
        )

    def hold(self, model: ModelId, name: str) -> None:
        """It has fetched a manifest."""
        if all(holding.model != model for holding in self.holdings):
            self.holdings = (*self.holdings, Holding(model, name, False))
