"""An office of agents on a network of its own: what they have agreed, and whether what they answer is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from mesh_processes import Running, wait_until
from namespaces import Lan, Resident
from test_whole_path import NEAR_TIE, Reference

from meshinfer.front import client
from meshinfer.model.store import find

NAMES: Final = ("ann", "bob", "cyd", "dan", "eve")
ASKERS: Final = ("ann", "dan")
"""They have the whole model: each of two islands can go on. The others have nothing and lend."""

SHARE: Final = ("--precision", "exact", "--split", "always", "--memory", "1 GiB", "--threads", "1")
LEND: Final = (*SHARE, "--lend-only")

SHORT: Final = ("What is the capital of France?", 16)
LONG: Final = ("Write a short story about a lighthouse keeper.", 40)
BEGUN: Final = 6
"""Pieces of a long answer that have been read when something happens to the mesh."""

_POOL: Final = ThreadPoolExecutor(16)


# ── what is right ───────────────────────────────────────────────────────────────────────────────────────────────


class UnsplitModel:
    """Says what an answer has to be, as far as it goes."""

    def __init__(self, store: Path) -> None:
        self._reference = Reference(find(store, "smollm2"))
        self._answers = {
            question: self._reference.greedy(self._reference.prompt(question), tokens)
            for question, tokens in (SHORT, LONG)
        }

    def check(self, question: str, said: str) -> None:
        """Only where the two best logits lie closer than `NEAR_TIE` may an answer go another way."""
        tokens, gaps = self._answers[question]
        wanted = self._reference.tokenizer.decode(tokens)
        if said != wanted:
            tie = next((place for place, gap in enumerate(gaps) if gap < NEAR_TIE), None)
            assert tie is not None, f"{question!r}:\n{said!r}\n{wanted!r}"
            assert said.startswith(self._reference.tokenizer.decode(tokens[:tie]))


class UnderWay:
    """A long answer that somebody reads while something happens to the mesh."""

    def __init__(self, agent: Resident) -> None:
        self._agent = agent
        self.pieces = 0
        self._answer = _POOL.submit(self._read)
        wait_until(f"{agent.name}'s answer has begun", self._begun, [agent])

    def _begun(self) -> bool:
        if self._answer.done():
            self._answer.result()
        return self.pieces >= BEGUN

    def _read(self) -> str:
        question, tokens = LONG
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        said = ""
        with self._agent.host.entered():
            for event in client.need(self._agent.home).events(body):
                said += event.get("text", "")
                self.pieces += 1
        return said

    def check(self, unsplit: UnsplitModel) -> None:
        """It was not there yet when it was disturbed, and went on to its end as if nothing had been."""
        unsplit.check(LONG[0], self._answer.result(timeout=120))


def ask_and_check(agent: Resident, unsplit: UnsplitModel) -> None:
    question, tokens = SHORT
    unsplit.check(question, agent.ask(question, max_tokens=tokens, ignore_eos=True)[0])


# ── what a mesh has agreed ──────────────────────────────────────────────────────────────────────────────────────


def held(agent: Resident, usable: bool) -> dict[str, frozenset[str]]:
    """The plans that all their owners stand by, as far as this agent knows, each with its owners' names; of those that
    one of them replaces, nothing is told."""
    try:
        plans, rows = agent.get("/api/plan")["plans"], agent.get("/api/peers")["peers"]
    except client.NotRunning:
        return {}
    accepted = {
        (row["name"], standing["plan"])
        for row in rows
        for standing in row["standings"]
        if standing["readiness"] != "failed"
    }
    found = {
        plan["plan"]: plan
        for plan in plans
        if all((owner["name"], plan["plan"]) in accepted for owner in plan["owners"])
        and (plan["usable"] or not usable)
    }
    replaced = {plan["replaces"] for plan in found.values()}
    return {
        each: frozenset(owner["name"] for owner in plan["owners"])
        for each, plan in found.items()
        if each not in replaced
    }


def agreed(agents: Iterable[Resident], usable: bool = False) -> bool:
    """All know the same plans, in which each of them owns a part once, and nobody else one; one plan or several."""
    first, *others = agents
    names = sorted(agent.name for agent in (first, *others))
    # One is asked alone until it has something to tell: to ask all of them all the time would slow them down.
    known = held(first, usable)
    if sorted(name for owners in known.values() for name in owners) != names:
        return False
    return all(each == known for each in _POOL.map(lambda agent: held(agent, usable), others))


def ready(agents: Iterable[Resident]) -> bool:
    """They can serve what they agreed on, and those among them who ask can be asked."""
    agents = list(agents)
    return agreed(agents, usable=True) and all(
        agent.status()["ready"] for agent in agents if agent.name in ASKERS
    )


def took(what: str, holds: Callable[[], object], agents: Iterable[Resident], since: float) -> float:
    """Seconds from `since` until `holds`; printed."""
    everybody: list[Running] = [*agents]
    wait_until(what, holds, everybody)
    seconds = time.monotonic() - since
    print(f"{what}: {seconds:.2f} s")
    return seconds


# ── the office ──────────────────────────────────────────────────────────────────────────────────────────────────


class Five:
    """Five agents, each on a host of its own that runs docker too."""

    def __init__(self, network: Lan, agents: dict[str, Resident]) -> None:
        self.network = network
        self.agents = agents
        self.agreed_s = 0.0

    def of(self, *names: str) -> list[Resident]:
        return [self.agents[name] for name in names]

    @property
    def all(self) -> list[Resident]:
        return self.of(*NAMES)

    def come_up(self) -> None:
        started_at = time.monotonic()
        took(
            "the last of five is up",
            lambda: all(a.status().get("door") for a in self.all),
            self.all,
            started_at,
        )
        up_at = time.monotonic()
        took("all know all", lambda: all(a.status()["peers"] == 4 for a in self.all), self.all, up_at)
        self.agreed_s = took("five agree", lambda: agreed(self.all), self.all, up_at)
        took("five are ready", lambda: ready(self.all), self.all, up_at)

    def mend(self) -> None:
        """Whatever a test before left behind."""
        self.network.heal()
        for name in NAMES:
            self.network.hosts[name].interface_up()
            if self.agents[name].process.poll() is not None:
                self.agents[name] = self.agents[name].again()
            self.agents[name].thaw()
        wait_until("five are ready", lambda: ready(self.all), [*self.all])
