"""A process that sends back whatever it hears: `net_child.py SEED PEER_SEED PEER_PORTS PORTS`."""

from __future__ import annotations

import asyncio
import sys

from net_support import Side, public_key

from meshinfer.net import loop
from meshinfer.values import Channel, PeerId, Ports


async def main(stop: asyncio.Event) -> None:
    seed, other = sys.argv[1:3]
    theirs, ours = (Ports(*map(int, argument.split(","))) for argument in sys.argv[3:5])

    def echo(channel: Channel, peer: PeerId, frames: list[memoryview]) -> None:
        side.transport.send(channel, peer, frames)

    side = Side(seed, [other], echo)
    side.bind(ours)
    side.transport.connect(side.name(other), public_key(other), "127.0.0.1", theirs)
    print("listening", flush=True)
    await stop.wait()
    await side.transport.close()


if __name__ == "__main__":
    loop.run(main)
