"""Which addresses of this PC the mesh uses."""

from __future__ import annotations

import ipaddress

import psutil
import pytest

from meshinfer.errors import ConfigError
from meshinfer.net.interfaces import current_addresses, listening_hosts, usable_addresses

LOOPBACK = next(
    name
    for name, entries in psutil.net_if_addrs().items()
    if any(entry.address == "127.0.0.1" for entry in entries)
)


def test_by_default_neither_loopback_nor_link_local_is_announced() -> None:
    for address in usable_addresses([]):
        ip = ipaddress.ip_address(address.host)
        assert not ip.is_loopback
        assert not ip.is_link_local
        assert 0 < address.prefix <= ip.max_prefixlen


@pytest.mark.parametrize("setting", [LOOPBACK, "127.0.0.1"])
def test_loopback_is_used_where_it_is_named(setting: str) -> None:
    addresses = usable_addresses([setting])
    assert addresses[0].host == "127.0.0.1"
    assert addresses[0].prefix == 8
    assert all(address.loopback for address in addresses)


def test_an_address_may_be_written_in_full() -> None:
    if "::1" not in [address.host for address in usable_addresses([LOOPBACK])]:
        pytest.skip("this PC has no IPv6")
    assert [address.host for address in usable_addresses(["0:0:0:0:0:0:0:1"])] == ["::1"]


@pytest.mark.parametrize("setting", ["wlan99", "203.0.113.7"])
def test_what_this_pc_does_not_have_is_named_with_what_it_has(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}.*{LOOPBACK}"):
        usable_addresses([LOOPBACK, setting])


def test_what_is_gone_for_the_moment_is_passed_over() -> None:
    assert current_addresses(["wlan99"]) == []


def test_loopback_alone_is_listened_on_alone() -> None:
    """Else an agent for trying things out would be open to the office."""
    assert "127.0.0.1" in listening_hosts([LOOPBACK])
    assert all(ipaddress.ip_address(host).is_loopback for host in listening_hosts([LOOPBACK]))


def test_else_everything_is_listened_on_so_that_a_new_address_works() -> None:
    assert listening_hosts([]) == ["*"]
