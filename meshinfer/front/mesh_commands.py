"""`meshinfer mesh …`: making a mesh, inviting to it, joining it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from meshinfer.front.options import home_option, json_option, print_json

if TYPE_CHECKING:
    from meshinfer.trust.token import Membership

_DAY_S: Final = 86_400.0


@click.group()
def mesh() -> None:
    """Make a mesh, invite to it, join it.

    \b
    On the first PC:     meshinfer mesh create
                         meshinfer mesh token
    On the other ones:   meshinfer mesh join TOKEN
    """


@mesh.command()
@home_option
@json_option
@click.option("--replace", is_flag=True, help="Leave the mesh that this PC belongs to.")
def create(home: Path, as_json: bool, replace: bool) -> None:
    """Make a mesh, with this PC as its first member."""
    from meshinfer.agent import config, membership

    made = membership.create_mesh(home, config.load(home).name, replace=replace)
    _tell_membership(
        home, made, f"made mesh {made.mesh[:8]}; invite other PCs with: meshinfer mesh token", as_json
    )


@mesh.command()
@home_option
@json_option
@click.option(
    "--days", type=click.FloatRange(0.001, 3650), default=7.0, show_default=True, help="How long it is good."
)
@click.option(
    "--address", "addresses", multiple=True, metavar="HOST:PORT", help="A door to knock at without mDNS."
)
def token(home: Path, as_json: bool, days: float, addresses: tuple[str, ...]) -> None:
    """Print a token that lets other PCs join. Whoever has it can: hand it on with care."""
    from meshinfer.agent import config, membership

    expires = time.time() + days * _DAY_S
    doors = [*addresses, *_own_doors(home), *map(str, config.load(home).network.peers)]
    text = membership.make_token(home, expires, doors)
    if as_json:
        print_json({"token": text, "expires": int(expires)})
        return
    # The token alone on standard output, so that it can be piped to where it is needed.
    click.echo(text)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
    click.echo(f"good until {until}; on the other PCs: meshinfer mesh join TOKEN", err=True)


def _own_doors(home: Path) -> list[str]:
    """Where the agent that runs here can be reached: a PC that mDNS does not reach finds the mesh so."""
    from meshinfer.agent.settings import Address
    from meshinfer.front import client

    running = client.find(home)
    status = running.get("/api/status") if running is not None else {}
    door = status.get("door")
    return [str(Address(host, door)) for host in status.get("addresses", ())] if door else []


@mesh.command()
@click.argument("token")
@home_option
@json_option
@click.option("--replace", is_flag=True, help="Leave the mesh that this PC belongs to.")
def join(token: str, home: Path, as_json: bool, replace: bool) -> None:
    """Join the mesh that TOKEN is from ("-" reads it from standard input)."""
    from meshinfer.agent import config, membership

    text = sys.stdin.read() if token == "-" else token  # noqa: S105, no password
    joined = membership.join(home, text, config.load(home).name, replace=replace)
    _tell_membership(home, joined, f"joined mesh {joined.mesh[:8]}", as_json)


@mesh.command()
@home_option
@json_option
def show(home: Path, as_json: bool) -> None:
    """Show which mesh this PC belongs to."""
    from meshinfer.agent import membership

    if not membership.is_member(home):
        if as_json:
            print_json({"mesh": None, "peer": None, "name": None, "may_invite": False})
        else:
            click.echo("this PC belongs to no mesh; begin one with: meshinfer mesh create")
        return
    identity = membership.load_or_create_identity(home)
    found = membership.load_membership(home, identity)
    key = membership.load_mesh_key(home)
    if found is None:
        raise FileNotFoundError(2, "the membership has just gone", str(home))
    may_invite = key is not None and key.mesh == found.mesh
    name = found.member(identity, time.time()).name
    if as_json:
        print_json({"mesh": found.mesh, "peer": identity.peer, "name": name, "may_invite": may_invite})
        return
    click.echo(f"mesh     {found.mesh}\npeer     {identity.peer}\nname     {name}")
    click.echo(f"invites  {'yes' if may_invite else 'no (only the PC where the mesh was created)'}")


def _tell_membership(home: Path, membership: Membership, sentence: str, as_json: bool) -> None:
    """A running agent keeps the membership that it started with: one agent, one roster, from start to end."""
    from meshinfer.agent.files import agent_runs
    from meshinfer.agent.membership import load_or_create_identity

    restart = agent_runs(home)
    if as_json:
        peer = load_or_create_identity(home).peer
        print_json({"mesh": membership.mesh, "peer": peer, "restart": restart})
        return
    click.echo(sentence)
    if restart:
        click.echo(
            "the agent that runs here takes part once it is restarted: meshinfer stop, then meshinfer start"
        )
