"""A process that announces itself and prints whom it finds: `net_announcer.py PEER_NUMBER MESH [INTERFACE…]`.

Each line is JSON: `["found", peer, door, [addresses]]`, `["lost", name]`; a line on its input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from meshinfer import limits
from meshinfer.net import loop
from meshinfer.net.discovery import Announcement, Discovery, Sighting
from meshinfer.values import PeerId


def say(*what: object) -> None:
    print(json.dumps(what), flush=True)


def found(sighting: Sighting) -> None:
    said = sighting.announcement
    say("found", said.peer, said.door, sighting.addresses)


async def main(stop: asyncio.Event) -> None:
    number, mesh, *interfaces = sys.argv[1:]
    peer = PeerId(f"{int(number):032x}")
    said = Announcement(limits.PROTOCOL_VERSION, mesh, peer, 5000 + int(number))
    discovery = Discovery(said, interfaces, found, lambda name: say("lost", name))
    await discovery.open()
    await asyncio.wait(
        {asyncio.create_task(stop.wait()), asyncio.create_task(asyncio.to_thread(sys.stdin.readline))},
        return_when="FIRST_COMPLETED",
    )
    await discovery.close()


if __name__ == "__main__":
    loop.run(main)
