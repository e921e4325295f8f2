"""What an agent says of itself: where it is, what it lends, how fast it is, what it has and what it wants."""

from __future__ import annotations

from meshinfer import __version__, limits
from meshinfer.agent import report
from meshinfer.agent.config import Config, Split
from meshinfer.agent.library import Library
from meshinfer.agent.network import Network
from meshinfer.agent.speeds import UNKNOWN, Speeds
from meshinfer.engine.device import Device
from meshinfer.engine.memory import asker_cost_bytes
from meshinfer.engine.speed import Speed
from meshinfer.values import Advert, ModelFacts, PeerId, Ports
from meshinfer.wire.advert import decode_advert, encode_advert

NOWHERE = Ports(1, 1, 1, 1)
"""The ports of an agent that is in no mesh: it listens nowhere, and nobody sees its advert."""


class Portrait:
    """Draws the agent as it is now; what the mesh itself says of it (links, rounds, standings) is left out."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        config: Config,
        device: Device,
        library: Library,
        speeds: Speeds,
        network: Network | None,
    ) -> None:
        self._me = me
        self._incarnation = incarnation
        self._config = config
        self._device = device
        self._library = library
        self._speeds = speeds
        self._network = network

    def draw(self, facts: ModelFacts | None) -> Advert:
        """As others will have it. `facts` are of the mesh's model: memory and speed depend on it."""
        config, network = self._config, self._network
        speed = self._speed(facts)
        bounded = self._device.largest_bytes < self._device.memory_bytes
        drawn = Advert(
            peer=self._me,
            name=config.name,
            incarnation=self._incarnation,
            version=0,
            addresses=network.addresses() if network else (),
            ports=network.ports if network else NOWHERE,
            program=__version__,
            rules=limits.RULES,
            device=self._device.name,
            precision=config.engine.precision,
            capacity_bytes=self._capacity_bytes(facts),
            allocation_bytes=self._device.largest_bytes if bounded else 0,
            decode_us=speed.decode_us,
            prefill_us=speed.prefill_us,
            holdings=self._library.holdings(),
            wants=self._library.wanted(config.model.default),
            min_owners=limits.ROUTE_HOPS if config.placement.split is Split.ALWAYS else 1,
            objective=config.placement.objective,
        )
        # Text is cleaned on the way, and all must compute with the same.
        return decode_advert(encode_advert(drawn))

    def why_not_ask(self, facts: ModelFacts) -> str | None:
        """Why nobody may ask on this PC, by its settings or its memory."""
        sharing = self._config.sharing
        if not sharing.ask:
            return "this PC only lends ([sharing] ask = false): ask on another one, or change that"
        needed = asker_cost_bytes(facts)
        if needed >= sharing.memory_bytes:
            return (
                f"asking {facts.name} takes {report.mib(needed)} here (its embedding and head), and [sharing] memory "
                f"is {report.mib(sharing.memory_bytes)}: share more, or ask on another PC"
            )
        return None

    def _capacity_bytes(self, facts: ModelFacts | None) -> int:
        """What shards may use here: all that is shared, less what asking takes where this PC asks and has the room."""
        shared = self._config.sharing.memory_bytes
        if not self._config.sharing.lend:
            return 0
        if facts is None or self.why_not_ask(facts) is not None:
            return shared
        return shared - asker_cost_bytes(facts)

    def _speed(self, facts: ModelFacts | None) -> Speed:
        """What one layer of the mesh's model takes here."""
        engine = self._config.engine
        if facts is None:
            return UNKNOWN
        return self._speeds.get(facts.model, self._device.name, engine.precision, engine.threads)
