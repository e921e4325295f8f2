"""Checks of single header fields: each returns the value, typed, or raises the one error.

A hostile value never appears in a message: only the field's name and the bound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgpack

from meshinfer.errors import WireError
from meshinfer.limits import ADDRESS_CHARS, ADDRESSES, ADDRESSES_READ
from meshinfer.text import is_printable
from meshinfer.values import ModelId, PeerId, Ports

U16: Final = 2**16 - 1
U32: Final = 2**32 - 1
U63: Final = 2**63 - 1
"""The widest number: fits a signed 64-bit integer everywhere."""

ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

Word = TypeVar("Word", bound=StrEnum)


def pack(fields: Sequence[object]) -> bytes:
    """MessagePack with every value in its shortest form, so that equal fields are equal bytes."""
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    return data


def unpack(data: bytes | memoryview, *, longest: int, bin_bytes: int, str_bytes: int) -> tuple[object, ...]:
    """The header's fields. `longest` bounds each array, the others each string.

    msgpack checks a length against its bound before it takes memory; worst case is one array of `longest` for
    each of its 1,024 levels. The protocol has neither maps nor extensions, so they are refused outright:
    there are no duplicate keys and no timestamps to think about.
    """
    try:
        fields = msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_array_len=longest,
            max_bin_len=bin_bytes,
            max_str_len=str_bytes,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError("msgpack", f"the header is not proper MessagePack ({type(error).__name__})") from None
    return array(fields, "header")


def array(value: object, name: str, longest: int = U32) -> tuple[object, ...]:
    if type(value) is not tuple or len(value) > longest:
        raise WireError("field", f"{name} is not an array of at most {longest}")
    return value


def record(value: object, name: str, fields: int) -> tuple[object, ...]:
    """An array with exactly so many fields: one more or less is another version's."""
    if type(value) is not tuple or len(value) != fields:
        raise WireError("field", f"{name} does not have {fields} fields")
    return value


def integer(value: object, name: str, highest: int = U63, lowest: int = 0) -> int:
    # `type` and not `isinstance`: True is an int to Python, and another byte on the wire.
    if type(value) is not int or not lowest <= value <= highest:
        raise WireError("field", f"{name} is not an integer in {lowest}…{highest}")
    return value


def integers(value: object, name: str, longest: int, highest: int = U63) -> tuple[int, ...]:
    """A flat array of integers in 0…`highest`, checked without a Python loop: it may have 1,024 of them."""
    numbers = array(value, name, longest)
    if numbers and (set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) > highest):  # type: ignore[type-var, operator]
        raise WireError("field", f"{name} holds something else than integers in 0…{highest}")
    return numbers  # type: ignore[return-value]


def ascending(values: Sequence[Any]) -> bool:
    """Each greater than the one before, so none twice."""
    return all(one < other for one, other in pairwise(values))


def boolean(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise WireError("field", f"{name} is not true or false")
    return value


def raw(value: object, name: str, length: int) -> bytes:
    if type(value) is not bytes or len(value) != length:
        raise WireError("field", f"{name} is not {length} bytes")
    return value


def blob(value: object, name: str, longest: int) -> bytes:
    if type(value) is not bytes or len(value) > longest:
        raise WireError("field", f"{name} is not at most {longest} bytes")
    return value


def records(value: object, name: str, longest: int, width: int) -> bytes:
    """A string of at most `longest` records of `width` bytes, the last one whole."""
    data = blob(value, name, longest * width)
    if len(data) % width:
        raise WireError("field", f"the last one of {name} is cut short")
    return data


def peer_id(value: object) -> PeerId:
    return PeerId(raw(value, "peer", ID_BYTES).hex())


def model_id(value: object) -> ModelId:
    return ModelId(raw(value, "model", DIGEST_BYTES).hex())


def word(words: type[Word], value: object, name: str) -> Word:
    for one in words:
        if one == value:
            return one
    raise WireError("field", f"{name} is not one of {', '.join(words)}")


def text(value: object, name: str, longest: int) -> str:
    if type(value) is not str or not is_printable(value, longest):
        raise WireError("text", f"{name} is not one line of at most {longest} printable characters")
    return value


def ports(value: object) -> Ports:
    door, control, data, bulk = record(value, "ports", 4)
    return Ports(*(integer(port, "port", U16, 1) for port in (door, control, data, bulk)))


def addresses(value: object) -> tuple[str, ...]:
    found = tuple(text(one, "address", ADDRESS_CHARS) for one in array(value, "addresses", ADDRESSES))
    if not all(map(reachable, found)):
        raise WireError("field", "an address is not a numeric one that another PC could connect to")
    return found


def announced(hosts: Sequence[str]) -> tuple[str, ...]:
    """What of `hosts` may be sent: those that mean something to another PC, the first `ADDRESSES` of them."""
    return tuple(filter(reachable, hosts))[:ADDRESSES]


@lru_cache(maxsize=ADDRESSES_READ)
def reachable(address: str) -> bool:
    """Whether another PC could use it: numeric, in canonical form, one host, no scope of this PC's."""
    try:
        host = ipaddress.ip_address(address)
    except ValueError:
        return False
    return str(host) == address and "%" not in address and not (host.is_multicast or host.is_unspecified)
