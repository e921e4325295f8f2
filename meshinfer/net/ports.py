"""Four neighbouring ports for one agent, and the next four where another agent has them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

from meshinfer import limits
from meshinfer.errors import ConfigError
from meshinfer.net.door import Door
from meshinfer.net.transport import Transport
from meshinfer.values import Ports

_TAKEN: Final = {errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES)}
"""Windows says "access denied" of a port that another program holds exclusively."""

_STEP: Final = 4
_HIGHEST: Final = 65_535


async def open_ports(door: Door, transport: Transport, hosts: Sequence[str], base_port: int) -> Ports:
    """Bind door, control, data and bulk to `base_port` and the three after it, or to the next four that are
    free.

    Args:
        hosts: addresses of this PC, or `*` (see `interfaces.listening_hosts`).
        base_port: 0 lets the system choose all four.

    Raises:
        ConfigError: all of `PORT_TRIES` are taken, or an address is not this PC's.
    """
    for base in _bases(base_port):
        try:
            return await _open(door, transport, hosts, base)
        except OSError as error:
            if error.errno not in _TAKEN:
                where = ", ".join(hosts)
                raise ConfigError(
                    f"cannot listen on {where}: {error.strerror}; see [network] interfaces"
                ) from error
    raise ConfigError(f"[network] port: no four free ports from {base_port} on; choose another")


def _bases(base_port: int) -> Sequence[int]:
    if base_port == 0:
        return [0]
    return range(base_port, min(base_port + limits.PORT_TRIES * _STEP, _HIGHEST - _STEP + 2), _STEP)


async def _open(door: Door, transport: Transport, hosts: Sequence[str], base: int) -> Ports:
    door_port = await door.open(hosts, base)
    try:
        rest = transport.bind(hosts, (base + 1, base + 2, base + 3) if base else (0, 0, 0))
    except OSError:
        await door.close()
        raise
    return Ports(door_port, *rest)
