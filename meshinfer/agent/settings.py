"""How each kind of setting is read: a value from TOML, the environment or an option becomes a typed one.

Every function here raises ValueError with the end of a sentence that says what is allowed.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

from meshinfer.limits import DOOR_PORT, NAME_CHARS
from meshinfer.text import is_printable

_Choice = TypeVar("_Choice", bound=StrEnum)

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MEMORY: Final = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE | re.ASCII)
_DEVICE: Final = re.compile(r"(?:CPU|GPU(?:\.\d{1,2})?|NPU)", re.ASCII)


class Address(NamedTuple):
    """Where a peer's door is: a host name or a literal address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def text(value: object) -> str:
    """A string with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{_shown(value)} is not a text; write it in quotes")
    return value.strip()


def secret(value: object) -> str:
    """As `text`, but a mistake does not repeat the value."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("not a text; write it in quotes")
    return value.strip()


def name(value: object) -> str:
    """What others see in their tables: 1 to 64 printable characters."""
    given = unicodedata.normalize("NFC", text(value))
    if not is_printable(given, NAME_CHARS):
        raise ValueError(f"a name has 1 to {NAME_CHARS} printable characters")
    return given


def words(value: object) -> tuple[str, ...]:
    """A list of strings, or one string with commas between."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) and part.strip() for part in value):
        return tuple(part.strip() for part in value)
    raise ValueError(f'{_shown(value)} is not a list of texts; write ["one", "two"]')


def addresses(value: object) -> tuple[Address, ...]:
    """A list of `host:port`; without a port, the usual one."""
    return tuple(address(part) for part in words(value))


def address(value: str) -> Address:
    """`host`, `host:port`, `address`, `[v6 address]:port`."""
    allowed = f'{_shown(value)} is not an address; write "host:port", such as "10.0.0.5:{DOOR_PORT}"'
    host, port_text = _host_and_port(value.strip())
    if not _is_host(host) or (port_text and not re.fullmatch(r"\d{1,5}", port_text, re.ASCII)):
        raise ValueError(allowed)
    number = int(port_text) if port_text else DOOR_PORT
    if not 1 <= number <= 65_535:
        raise ValueError(f"{_shown(value)} has a port outside 1 to 65535")
    return Address(host, number)


def _host_and_port(value: str) -> tuple[str, str]:
    if bracketed := re.fullmatch(r"\[([^\]]+)\](?::(.+))?", value):
        return bracketed[1], bracketed[2] or ""
    if value.count(":") > 1:
        # A bare IPv6 address: its last group is not a port.
        return value, ""
    host, _, port_text = value.partition(":")
    return host, port_text


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        # All digits and dots, but no address: a slip such as 10.0.0.256, not a name.
        looks_numeric = re.fullmatch(r"[\d.]+", host, re.ASCII) is not None
        return (
            len(host) <= 253 and not looks_numeric and all(map(_LABEL.fullmatch, host.rstrip(".").split(".")))
        )
    return True


def port(value: object) -> int:
    """A TCP port; 0 for any that is free."""
    return _integer(value, 0, 65_535, "a port is a number from 0 (any free one) to 65535")


def threads(value: object) -> int | None:
    """Threads for computing; 0 or "auto" leaves it to the device."""
    if value == "auto":
        return None
    return _integer(value, 0, 1024, 'threads is a number from 1 to 1024, or "auto"') or None


def _integer(value: object, low: int, high: int, allowed: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{_shown(value)} will not do; {allowed}")
    return value


def switch(value: object) -> bool:
    """true or false; as text also yes, no, on, off, 1, 0."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"{_shown(value)} will not do; write true or false")


def memory_bytes(value: object) -> int:
    """A number of bytes, or "2 GiB", "1.5 GB", "800 MiB": KB is 1000 bytes, KiB 1024 (IEC 80000-13)."""
    allowed = f'{_shown(value)} is not an amount of memory; write "2 GiB" or "800 MB"'
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(allowed)
    found = _MEMORY.fullmatch(str(value))
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(allowed)
    amount = int(Decimal(found[1]) * _UNITS[found[2].lower()])
    if amount > 2**50:
        raise ValueError(f"{_shown(value)} is more than any PC has")
    return amount


def device(value: object) -> str:
    """ "auto", or an OpenVINO device's name."""
    given = text(value)
    if given.lower() == "auto":
        return "auto"
    if not _DEVICE.fullmatch(given.upper()):
        raise ValueError(f'{_shown(value)} is not a device; allowed: "auto", "CPU", "GPU", "GPU.1", "NPU"')
    return given.upper()


def choice(kind: type[_Choice]) -> Callable[[object], _Choice]:
    """One word of an enumeration, in any case."""
    allowed = ", ".join(f'"{member.value}"' for member in kind)

    def parse(value: object) -> _Choice:
        try:
            return kind(str(value).strip().lower())
        except ValueError:
            raise ValueError(f"{_shown(value)} is not known; allowed: {allowed}") from None

    return parse


def _shown(value: object) -> str:
    """The value as a person wrote it, short enough for a sentence."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "…"
