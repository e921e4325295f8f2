"""What an agent tells about itself, as plain data for people's tables and programs' JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from meshinfer import __version__
from meshinfer.limits import MIB
from meshinfer.mesh.plan import plan_id
from meshinfer.net.loop import monotonic
from meshinfer.values import Advert, Plan

if TYPE_CHECKING:
    from meshinfer.agent.agent import Agent


def mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // MIB):,} MiB"


def status(agent: Agent) -> dict[str, Any]:
    reason = agent.why_not_ready()
    ownership = agent.ownership
    plan = ownership.plan
    facts = None if plan is None else ownership.facts(plan.model)
    standing = ownership.standing
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
        "spans": [
            {
                "first": serving.span.first,
                "last": serving.span.last,
                "device": serving.shard.device,
                "kv_blocks": serving.shard.blocks_total,
                "kv_blocks_free": serving.shard.blocks_free,
            }
            for serving in agent.owner.serving
        ],
        "readiness": None if standing is None else standing.readiness.value,
        "fetching": {
            what: {"done_bytes": done, "total_bytes": total} for what, (done, total) in agent.progress.items()
        },
        "answers": agent.asker.under_way,
        "device": agent.device.name,
        "precision": agent.config.engine.precision.value,
        "memory_bytes": agent.config.sharing.memory_bytes,
        "door": agent.network.ports.door if agent.network is not None else None,
        "addresses": list(agent.network.addresses()) if agent.network is not None else [],
        "peers": len(ownership.view.peers(monotonic())) - 1,
        "problems": [
            *(agent.network.problems() if agent.network is not None else []),
            *agent.library.problems(),
        ],
        "metrics": agent.metrics.as_json(),
    }


def peers(agent: Agent) -> list[dict[str, Any]]:
    now = monotonic()
    return [_peer(agent, advert, now) for advert in agent.ownership.view.peers(now)]


def _peer(agent: Agent, advert: Advert, now: float) -> dict[str, Any]:
    view = agent.ownership.view
    heard_s = view.heard_s(advert.peer, now)
    standing = advert.standing
    spans = [] if standing is None else [a for a in standing.plan.assignments if a.peer == advert.peer]
    return {
        "peer": advert.peer,
        "name": advert.name,
        "self": advert.peer == agent.me,
        "addresses": list(advert.addresses),
        "device": advert.device,
        "precision": advert.precision.value,
        "memory_bytes": advert.capacity_bytes,
        "heard_s": None if heard_s is None else round(heard_s, 2),
        "spans": [{"first": a.span.first, "last": a.span.last, "device": a.device} for a in spans],
        "readiness": None if standing is None else standing.readiness.value,
        "program": advert.program,
        "models": [holding.name for holding in advert.holdings],
    }


def plan(agent: Agent) -> dict[str, Any]:
    ownership = agent.ownership
    current = ownership.plan
    if current is None:
        names = {advert.peer: advert.name for advert in ownership.view.peers(monotonic())}
        shortfall = ownership.shortfall
        available = () if shortfall is None else shortfall.available
        return {
            "plan": None,
            "reason": ownership.reason,
            "needed_bytes": None if shortfall is None else shortfall.needed_bytes,
            "by_peer": [
                {"peer": peer, "name": names.get(peer, peer[:8]), "available_bytes": size}
                for peer, size in available
            ],
        }
    facts = ownership.facts(current.model)
    return {
        "plan": plan_id(current),
        "usable": ownership.usable,
        "reason": None if ownership.usable else ownership.reason,
        "model": current.model,
        "model_name": facts.name if facts is not None else current.model[:12],
        "layers": current.layers,
        "predicted_us": current.predicted_us,
        "owners": [_owner(agent, current, index) for index in range(len(current.assignments))],
    }


def _owner(agent: Agent, current: Plan, index: int) -> dict[str, Any]:
    assignment = current.assignments[index]
    advert = agent.ownership.view.get(assignment.peer)
    standing = advert.standing if advert is not None else None
    holds = standing is not None and standing.plan == current
    return {
        "peer": assignment.peer,
        "name": agent.name_of(assignment.peer),
        "span": {"first": assignment.span.first, "last": assignment.span.last},
        "device": assignment.device,
        "pool_tokens": assignment.pool_tokens,
        "precision": current.inputs[index].precision.value,
        "readiness": standing.readiness.value if holds and standing is not None else None,
    }
