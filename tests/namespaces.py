"""A small network of its own, for tests: hosts in network namespaces, joined by a bridge that can be cut and healed.

Linux only, and only for who may make namespaces (`refusal` says why not). The root namespace gets nothing but names,
and each name carries the number of the process that made it: what a killed one left behind is swept by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
from mesh_processes import Running, command, environment

from meshinfer.agent import membership

PREFIX: Final = "meshinfer-test"
NETWORK: Final = "10.77.0"
DOCKER_ADDRESS: Final = "172.17.0.1"
"""What docker gives to its bridge on every PC alike."""

NAMESPACES: Final = Path("/run/netns")
"""Where `ip` keeps their names."""

_OURS: Final = re.compile(rf"{PREFIX}-(\d+)-[\w-]+")
_CLONE_NEWNET: Final = 0x40000000
_LANS: Final = itertools.count()
"""Networks that this process has made: two may stand side by side."""

_TOKEN_S: Final = 3600.0


class NetworkError(Exception):
    """`ip` refused."""


def ip(*lines: str, namespace: str | None = None) -> str:
    """Carries out commands of ip(8), all in one namespace; its output."""
    words = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    try:
        done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise NetworkError("there is no `ip` (iproute2) on this PC") from None
    if done.returncode != 0:
        raise NetworkError(f"ip: {done.stderr.strip()} ({'; '.join(lines)})")
    return done.stdout


def refusal() -> str | None:
    """Why this user cannot make namespaces here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    name = f"{PREFIX}-{os.getpid()}-trial"
    try:
        ip(f"netns add {name}")
        try:
            ip("link add trial type bridge", namespace=name)
        finally:
            ip(f"netns del {name}")
    except NetworkError as error:
        return f"this user cannot make network namespaces here: {error}"
    return None


# ── hosts ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Host:
    """One PC of the network: a namespace with a loopback, one cable to the bridge, and an address.

    Make them by `lan`.
    """

    def __init__(self, name: str, namespace: str, address: str, switch: str) -> None:
        self.name = name
        self.namespace = namespace
        self.address = address
        self.cable = f"to-{name}"
        self._switch = switch

    def plug_in(self) -> None:
        """The cable, and what a PC sets up when it gets one."""
        ip(
            f"link add {self.cable} mtu 1500 type veth peer name eth0 netns {self.namespace}",
            f"link set {self.cable} master near up",
            namespace=self._switch,
        )
        ip("link set lo up", f"address add {self.address}/24 dev eth0", namespace=self.namespace)
        self.interface_up()

    def interface_down(self) -> None:
        """Its routes go with it: what is sent from here fails at once, and what was on its way is lost."""
        ip("link set eth0 down", namespace=self.namespace)

    def interface_up(self) -> None:
        # The way to its own network comes back by itself, that for multicast does not: DHCP clients set it again.
        ip("link set eth0 up", "route replace 224.0.0.0/4 dev eth0", namespace=self.namespace)

    def run_docker(self) -> None:
        """A bridge as docker makes one, with a container on it, else it would have no carrier."""
        ip(
            "link add docker0 type bridge",
            f"address add {DOCKER_ADDRESS}/16 dev docker0",
            "link add container type veth peer name container-eth0",
            "link set container master docker0 up",
            "link set container-eth0 up",
            "link set docker0 up",
            namespace=self.namespace,
        )

    def linked_to(self) -> set[str]:
        """Addresses at the far ends of the TCP connections that stand."""
        words = ["ss", "-HtnN", self.namespace, "state", "established"]
        rows = subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()
        ends = (row.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for row in rows)
        return {end for end in ends if not end.startswith("127.")}

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """A process here. `ip netns exec` becomes what it starts: the number is the process's own."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *words], **options)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread opens in the block are this host's; they stay so after it."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            there = os.open(NAMESPACES / self.namespace, os.O_RDONLY)
            try:
                _set_namespace(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _set_namespace(own)
        finally:
            os.close(own)


def _set_namespace(descriptor: int) -> None:
    """Of the calling thread alone: setns(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


# ── the network between them ────────────────────────────────────────────────────────────────────────────────────


class Lan:
    """Hosts on one bridge. Whatever is cut is cut without a word: frames vanish, and nobody is told."""

    def __init__(self, hosts: Mapping[str, Host], switch: str) -> None:
        self.hosts = hosts
        self._switch = switch

    def split(self, away: Iterable[str]) -> None:
        """These hosts go on among themselves, as when the cable between two switches breaks."""
        ip(*(f"link set {self.hosts[name].cable} master far" for name in away), namespace=self._switch)

    def heal(self) -> None:
        ip(*(f"link set {host.cable} master near" for host in self.hosts.values()), namespace=self._switch)

    def block_multicast(self) -> None:
        """As Wi-Fi with client isolation and many a managed switch do; broadcasts (ARP) still pass."""
        ip(
            *(
                f"link set {host.cable} type bridge_slave mcast_flood off mcast_router 0"
                for host in self.hosts.values()
            ),
            namespace=self._switch,
        )


@contextlib.contextmanager
def lan(names: Iterable[str]) -> Iterator[Lan]:
    """A network of hosts by these names. At the end of the block it is gone, and with it every process in it."""
    sweep()
    prefix = f"{PREFIX}-{os.getpid()}-{next(_LANS)}"
    switch = f"{prefix}-switch"
    hosts = {
        name: Host(name, f"{prefix}-{name}", f"{NETWORK}.{number}", switch)
        for number, name in enumerate(names, 1)
    }
    with contextlib.ExitStack() as made:
        for namespace in (switch, *(host.namespace for host in hosts.values())):
            made.callback(remove, namespace)
            ip(f"netns add {namespace}")
        # Snooping would need somebody who asks for memberships; without it a bridge floods, as plain switches do.
        ip(
            *(f"link add {bridge} type bridge mcast_snooping 0" for bridge in ("near", "far")),
            *(f"link set {bridge} up" for bridge in ("near", "far")),
            namespace=switch,
        )
        for host in hosts.values():
            host.plug_in()
        yield Lan(hosts, switch)


def remove(namespace: str) -> None:
    """Ends the processes in a namespace that we made, frozen ones too, and takes its name away."""
    if not (NAMESPACES / namespace).exists():
        return
    for pid in ip(f"netns pids {namespace}").split():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(int(pid), signal.SIGKILL)
    try:
        ip(f"netns del {namespace}")
    except NetworkError:
        # Another test process may sweep the same leftover.
        if (NAMESPACES / namespace).exists():
            raise


def sweep() -> None:
    """What test processes left that were killed before they could tidy up."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        ours = _OURS.fullmatch(path.name)
        if ours is not None and not psutil.pid_exists(int(ours[1])):
            remove(path.name)


# ── agents on them ──────────────────────────────────────────────────────────────────────────────────────────────


class Resident(Running):
    """An agent's process on a host. It listens wherever a freshly installed one does."""

    def __init__(self, host: Host, home: Path, *options: str) -> None:
        # Running's own would start it on this PC's loopback.
        self.host = host
        self.home = home
        self.name = home.name
        self.log = home / "output.log"
        self.options = options
        words = command("start", "--home", home, "--name", home.name, "--until-input-ends", *options)
        with self.log.open("ab") as log:
            self.process = host.start(
                *words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment()
            )

    def get(self, path: str) -> dict[str, Any]:
        with self.host.entered():
            return super().get(path)

    def ask(self, text: str, **fields: object) -> tuple[str, dict[str, Any]]:
        with self.host.entered():
            return super().ask(text, **fields)

    def kill(self) -> None:
        """As a power cut would, but that its sockets break."""
        self.process.kill()
        self.process.communicate()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def again(self) -> Resident:
        """A new process on the same home."""
        return Resident(self.host, self.home, *self.options)


def found_mesh(homes: Iterable[Path]) -> None:
    """Puts all these homes into one mesh; the first founds it."""
    first, *others = homes
    membership.create_mesh(first, first.name)
    token = membership.make_token(first, time.time() + _TOKEN_S)
    for home in others:
        membership.join(home, token, home.name)


@contextlib.contextmanager
def residents(
    network: Lan, root: Path, options: Mapping[str, tuple[str, ...]]
) -> Iterator[dict[str, Resident]]:
    """An agent on each host named, started at once, its home `root / name`. What is in the dictionary at the end of
    the block is ended then: put restarted ones there."""
    found_mesh(root / name for name in options)
    agents: dict[str, Resident] = {}
    try:
        for name, words in options.items():
            agents[name] = Resident(network.hosts[name], root / name, *words)
        yield agents
    finally:
        stop(agents.values())


def stop(agents: Iterable[Resident]) -> None:
    """All at once, politely; those that do not go are ended."""
    running = [agent for agent in agents if agent.process.poll() is None]
    for agent in running:
        agent.thaw()
        assert agent.process.stdin is not None
        agent.process.stdin.close()
    for agent in running:
        try:
            agent.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            agent.process.kill()
            agent.process.wait()
