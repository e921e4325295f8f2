"""Which of this PC's addresses the mesh uses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from meshinfer.errors import ConfigError
from meshinfer.net.sockets import WILDCARD


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """An address of this PC: `host` is IPv4 or IPv6 without a zone, `prefix` its network's length in bits."""

    host: str
    prefix: int
    interface: str

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def version(self) -> int:
        return ipaddress.ip_address(self.host).version


def usable_addresses(setting: Sequence[str]) -> list[Address]:
    """The addresses that other agents may be told of, in a stable order, IPv4 first.

    Args:
        setting: names of interfaces, or addresses; empty for all interfaces that are up. Loopback is used
            only where it is named. Link-local addresses are never used: they mean nothing without the
            receiver's own zone.

    An interface that exists but is down, or has lost its addresses, gives none now: it may come back.

    Raises:
        ConfigError: a name or address that this PC does not have; those that it has are named.
    """
    interfaces = set(psutil.net_if_addrs())
    hosts = {address.host for address in _present()}
    for name in setting:
        if name not in interfaces and _normal(name) not in hosts:
            known = ", ".join(sorted(interfaces) + sorted(hosts))
            raise ConfigError(f"[network] interfaces: this PC has no {name!r}; it has {known}")
    return current_addresses(setting)


def current_addresses(setting: Sequence[str]) -> list[Address]:
    """As `usable_addresses`, but what is not there now, a cable out or a lease run out, is passed over."""
    up = {interface for interface, stats in psutil.net_if_stats().items() if stats.isup}
    wanted = {_normal(name) for name in setting}
    addresses = [
        address
        for address in _present()
        if address.interface in up and (address.interface in wanted or address.host in wanted or not wanted)
    ]
    usable = [
        address
        for address in addresses
        if not ipaddress.ip_address(address.host).is_link_local and (wanted or not address.loopback)
    ]
    return sorted(usable, key=lambda address: (address.version, address.interface, address.host))


def listening_hosts(setting: Sequence[str]) -> list[str]:
    """What to bind to: loopback alone if nothing else is configured, else everything.

    A wildcard goes on working when an address changes (DHCP, Wi-Fi to cable); a single address would not.
    """
    addresses = current_addresses(setting)
    if setting and addresses and all(address.loopback for address in addresses):
        return [address.host for address in addresses]
    return [WILDCARD]


def _present() -> Iterator[Address]:
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                host = entry.address.partition("%")[0]
                yield Address(host, _prefix(host, entry.netmask), interface)


def _prefix(host: str, netmask: str | None) -> int:
    if netmask is None:
        return ipaddress.ip_address(host).max_prefixlen
    return int(ipaddress.ip_address(netmask)).bit_count()


def _normal(name: str) -> str:
    """IPv6 addresses can be written in many ways; names pass unchanged."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
