"""What an agent tells about itself, as plain data for people's tables and programs' JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from meshinfer import __version__
from meshinfer.agent.report_plan import fetching
from meshinfer.agent.shards import Loaded
from meshinfer.engine.speed import Speed
from meshinfer.limits import MIB
from meshinfer.mesh.plan import plan_id
from meshinfer.net.loop import monotonic
from meshinfer.values import Advert, PeerId, Standing

if TYPE_CHECKING:
    from meshinfer.agent.agent import Agent


def mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // MIB):,} MiB"


# ── this PC ─────────────────────────────────────────────────────────────────────────────────────────────────
def status(agent: Agent) -> dict[str, Any]:
    reason = agent.why_not_ready()
    plan = agent.mesh.plan
    model = None if plan is None else plan.model
    facts = next((one for one in agent.library.facts() if one.model == model), None)
    return {
        "peer": agent.me,
        "name": agent.config.name,
        "pid": os.getpid(),
        "program": __version__,
        "state": "ready" if reason is None else "waiting",
        "ready": reason is None,
        "reason": reason,
        "mesh": agent.membership.mesh if agent.membership is not None else None,
        "model": None if facts is None else {"id": facts.model, "name": facts.name, "layers": facts.layers},
        "spans": [_loaded(agent, loaded) for loaded in agent.owner.loaded],
        "standings": [_standing(standing) for standing in agent.mesh.standings],
        "fetching": fetching(agent),
        "answers": agent.asker.under_way,
        "device": agent.device.name,
        "precision": agent.config.engine.precision.value,
        "memory_bytes": agent.config.sharing.memory_bytes,
        "door": agent.network.ports.door if agent.network is not None else None,
        "addresses": list(agent.network.addresses()) if agent.network is not None else [],
        "peers": len(agent.mesh.view.present) - 1,
        "problems": [
            *(agent.network.problems() if agent.network is not None else []),
            *agent.library.problems(),
        ],
        "metrics": agent.metrics.as_json(),
    }


def _loaded(agent: Agent, loaded: Loaded) -> dict[str, Any]:
    observed = agent.owner.observed(loaded.key)
    return {
        "first": loaded.key.span.first,
        "last": loaded.key.span.last,
        "model": loaded.key.model,
        "device": loaded.key.device,
        "kv_blocks": loaded.shard.blocks_total,
        "kv_blocks_free": loaded.shard.blocks_free,
        "speed": _speed(loaded.speed),
        "observed": None if observed is None else _speed(observed),
    }


def _speed(speed: Speed) -> dict[str, int | None]:
    """Microseconds for one average layer and one token; None where there was no such step."""
    return {"decode_us": speed.decode_us or None, "prefill_us": speed.prefill_us or None}


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "plan": plan_id(standing.plan),
        "readiness": standing.readiness.value,
        "detail": standing.detail or None,
        "spans": [{"first": span.first, "last": span.last} for span in standing.spans],
    }


# ── the others ──────────────────────────────────────────────────────────────────────────────────────────────
def peers(agent: Agent) -> list[dict[str, Any]]:
    """Everybody who is reachable, and what this PC knows of its own links to them."""
    links = links_of(agent.mesh.own)
    now = monotonic()
    return [_peer(agent, advert, links.get(advert.peer), now) for advert in agent.mesh.view.present]


def _peer(agent: Agent, advert: Advert, link: dict[str, Any] | None, now: float) -> dict[str, Any]:
    heard_s = agent.mesh.view.heard_s(advert.peer, now)
    return {
        "peer": advert.peer,
        "name": advert.name,
        "self": advert.peer == agent.me,
        "addresses": list(advert.addresses),
        "device": advert.device,
        "precision": advert.precision.value,
        "memory_bytes": advert.capacity_bytes,
        "decode_us": advert.decode_us or None,
        "prefill_us": advert.prefill_us or None,
        "heard_s": None if heard_s is None else round(heard_s, 2),
        "link": link,
        "spans": spans_of(advert),
        "standings": [_standing(standing) for standing in advert.standings],
        "program": advert.program,
        "models": [holding.name for holding in advert.holdings],
    }


def links_of(own: Advert) -> dict[PeerId, dict[str, Any]]:
    """By peer; a link may be up and yet no route use it, because it failed lately."""
    links: dict[PeerId, dict[str, Any]] = {
        link.peer: {
            "up": True,
            "broken": False,
            "round_trip_us": link.round_trip_us or None,
            "kbit_s": link.kbit_s or None,
        }
        for link in own.links
    }
    for peer in own.broken:
        down = {"up": False, "round_trip_us": None, "kbit_s": None}
        links[peer] = {**links.get(peer, down), "broken": True}
    return links


def spans_of(advert: Advert) -> list[dict[str, Any]]:
    """What a peer runs or stands by with, under whatever plans, each once and in order of layers."""
    found: dict[tuple[int, int, str, str], bool] = {}
    for standing in advert.standings:
        plan = standing.plan
        for role, given in (("owner", plan.assignments), ("standby", plan.standbys)):
            for one in given:
                if one.peer == advert.peer:
                    key = (one.span.first, one.span.last, role, one.device)
                    found[key] = found.get(key, False) or one.span in standing.spans
    return [
        {"first": first, "last": last, "role": role, "device": device, "ready": ready}
        for (first, last, role, device), ready in sorted(found.items())
    ]
