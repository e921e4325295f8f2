"""Finding the other agents of a mesh on the local network, by multicast DNS (RFC 6762, RFC 6763).

An announcement is a hint and proves nothing: whoever it names is knocked at, and shows a certificate.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zeroconf
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from meshinfer import limits
from meshinfer.net.interfaces import Address, current_addresses
from meshinfer.net.loop import wall
from meshinfer.values import PeerId

SERVICE: Final = "_meshinfer._tcp.local."

_PEER: Final = re.compile(r"[0-9a-f]{32}")
_SLEPT_S: Final = limits.INTERFACE_CHECK_S + 5.0
_FAILURES: Final = (OSError, RuntimeError, zeroconf.Error)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What an agent says of itself: TXT keys `p` (protocol), `m` (mesh), `i` (peer); SRV port: its door."""

    protocol: int
    mesh: str
    peer: PeerId
    door: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """Someone's announcement, unproven; `addresses` are IPv4 and IPv6 without zones, at most `ADDRESSES`."""

    name: str
    announcement: Announcement
    addresses: tuple[str, ...]


class Discovery:
    """Announces this agent, and tells of the others that announce the same mesh.

    Args:
        announcement: of this agent.
        interfaces: as for `interfaces.usable_addresses`; loopback works too, for several agents on one PC.
        found: called in the loop with each sighting, and again when it changes.
        lost: called with the name of a sighting when its agent says goodbye, or its announcement runs out.

    `problem` says why discovery does not work at the moment, None when it does. Nothing ends it but `close`:
    what fails is tried again every `INTERFACE_CHECK_S`, when the addresses of this PC are read as well.

    Where the PC has an IPv4 address, multicast goes over IPv4 alone; addresses of both kinds are announced.

    `counters`: `ignored` (announcements of other meshes), `garbled`, `overflow` (beyond `DISCOVERED_NAMES`).
    """

    def __init__(
        self,
        announcement: Announcement,
        interfaces: Sequence[str],
        found: Callable[[Sighting], None],
        lost: Callable[[str], None],
    ) -> None:
        self.problem: str | None = "not started"
        self.counters: Counter[str] = Counter()
        self._announcement = announcement
        self._interfaces = tuple(interfaces)
        self._found = found
        self._lost = lost
        self._sightings: dict[str, Sighting] = {}
        self._waiting: dict[str, None] = {}  # an ordered set: names whose details are still to be asked for
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._addresses: list[Address] = []
        self._stale = True  # what is announced may not be what is true
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to announce and to listen, in the background: the announcement takes about a second."""
        self._task = asyncio.get_running_loop().create_task(self._watch_interfaces())

    async def close(self) -> None:
        """Say goodbye, and stop."""
        await _cancelled([self._task] if self._task else [])
        if self._browser is not None:
            await self._browser.async_cancel()
        self._waiting.clear()
        await _cancelled(list(self._lookups.values()))
        if self._zeroconf is not None:
            await self._zeroconf.async_close()
        self._zeroconf = self._browser = self._task = None
        self.problem = "closed"

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """Those that are announced now."""
        return tuple(self._sightings.values())

    # ── this PC
    # ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _watch_interfaces(self) -> None:
        checked = wall()
        while True:
            now = wall()
            await self._refresh(woken=now - checked > _SLEPT_S)
            checked = now
            await asyncio.sleep(limits.INTERFACE_CHECK_S)

    async def _refresh(self, woken: bool) -> None:
        """Follow the PC's addresses; after a sleep join all groups anew, whatever the addresses."""
        try:
            addresses = await asyncio.to_thread(current_addresses, self._interfaces)
            self._stale = self._stale or woken or addresses != self._addresses
            self._addresses = addresses
            if self._zeroconf is None:
                await self._start(addresses)
            elif self._stale:
                await self._follow(self._zeroconf, addresses, woken)
            self._stale = False
            self._report(None if addresses else "no interface has a usable address")
        except _FAILURES as error:
            self._report(f"multicast DNS: {error}")

    def _report(self, problem: str | None) -> None:
        if problem != self.problem:
            _log.info("discovery: %s", problem or "works")
            self.problem = problem

    async def _start(self, addresses: list[Address]) -> None:
        opened = self._zeroconf = AsyncZeroconf(interfaces=_multicast_hosts(addresses))
        try:
            # The name is the peer's id: nobody else has it, and who pretends to shall not keep us from
            # announcing.
            announced = await opened.async_register_service(
                self._info(addresses), cooperating_responders=True
            )
            self._browser = AsyncServiceBrowser(opened.zeroconf, SERVICE, handlers=[self._changed])
            await announced
        except _FAILURES:
            self._zeroconf = None
            await opened.async_close()
            raise

    async def _follow(self, opened: AsyncZeroconf, addresses: list[Address], woken: bool) -> None:
        if woken:
            await opened.async_update_interfaces([])
        await opened.async_update_interfaces(_multicast_hosts(addresses))
        await (await opened.async_update_service(self._info(addresses)))

    def _info(self, addresses: list[Address]) -> AsyncServiceInfo:
        said = self._announcement
        return AsyncServiceInfo(
            SERVICE,
            f"{said.peer}.{SERVICE}",
            port=said.door,
            properties={"p": str(said.protocol), "m": said.mesh, "i": said.peer},
            parsed_addresses=[address.host for address in addresses][: limits.ADDRESSES],
            server=f"{said.peer}.local.",
            host_ttl=limits.ANNOUNCEMENT_TTL_S,
            other_ttl=limits.ANNOUNCEMENT_TTL_S,
        )

    # ── the others
    # ────────────────────────────────────────────────────────────────────────────────────────────────
    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if name == f"{self._announcement.peer}.{SERVICE}":
            return
        if state_change is ServiceStateChange.Removed:
            self._waiting.pop(name, None)
            if self._sightings.pop(name, None) is not None:
                self._lost(name)
            return
        info = AsyncServiceInfo(service_type, name)
        if info.load_from_cache(zeroconf):
            self._see(name, info)  # the usual case: an announcement brings its details along
        else:
            self._wait(name)
            self._look_up(zeroconf)

    def _wait(self, name: str) -> None:
        # The newest are asked after first and the oldest forgotten: after a flood of names the next real one
        # is heard.
        self._waiting[name] = None
        if len(self._waiting) > limits.DISCOVERED_NAMES:
            del self._waiting[next(iter(self._waiting))]
            self.counters["overflow"] += 1

    def _look_up(self, zeroconf: Zeroconf) -> None:
        while self._waiting and len(self._lookups) < limits.DISCOVERY_LOOKUPS:
            name, _ = self._waiting.popitem()
            if name not in self._lookups:
                task = asyncio.get_running_loop().create_task(self._ask(zeroconf, name))
                self._lookups[name] = task
                task.add_done_callback(lambda _: self._looked_up(zeroconf))

    def _looked_up(self, zeroconf: Zeroconf) -> None:
        self._lookups = {name: task for name, task in self._lookups.items() if not task.done()}
        self._look_up(zeroconf)

    async def _ask(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        try:
            if await info.async_request(zeroconf, limits.DISCOVERY_LOOKUP_MS):
                self._see(name, info)
        except _FAILURES as error:
            _log.debug("no details of %s: %s", name, error)

    def _see(self, name: str, info: AsyncServiceInfo) -> None:
        sighting = _sighting(name, info, any(address.loopback for address in self._addresses))
        if sighting is None:
            self.counters["garbled"] += 1
        elif sighting.announcement.mesh != self._announcement.mesh:
            self.counters["ignored"] += 1
        elif name not in self._sightings and len(self._sightings) >= limits.DISCOVERED_NAMES:
            self.counters["overflow"] += 1
        elif self._sightings.get(name) != sighting:
            self._sightings[name] = sighting
            self._found(sighting)


def _multicast_hosts(addresses: Sequence[Address]) -> list[str]:
    """A socket for each: IPv4 where there is any, because that is what works everywhere."""
    four = [address.host for address in addresses if address.version == 4]
    six = [address.host for address in addresses if address.version == 6 and not address.loopback]
    return four or six


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _sighting(name: str, info: AsyncServiceInfo, loopback: bool) -> Sighting | None:
    # An announced loopback address is a peer's only where we use loopback; else it would have us knock at
    # ourselves.
    said = {key: (value or b"").decode("utf-8", "replace") for key, value in info.properties.items()}
    protocol, mesh, peer = said.get(b"p", ""), said.get(b"m", ""), said.get(b"i", "")
    if not (
        protocol.isdecimal()
        and len(protocol) < 6
        and len(mesh) <= limits.NAME_CHARS
        and _PEER.fullmatch(peer)
    ):
        return None
    usable = tuple(host for host in info.parsed_addresses(IPVersion.All) if _means_a_peer(host, loopback))
    if not usable or not info.port:
        return None
    announcement = Announcement(int(protocol), mesh, PeerId(peer), info.port)
    return Sighting(name, announcement, usable[: limits.ADDRESSES])


def _means_a_peer(host: str, loopback: bool) -> bool:
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return loopback
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)
