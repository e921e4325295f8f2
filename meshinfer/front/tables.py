"""How the mesh looks to a person: who is here, who runs what, and what that was to take and takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from meshinfer.front import render

_PEERS: Final = (
    "name",
    "peer",
    "device",
    "memory",
    "layers",
    "link",
    "round trip ms",
    "Mbit/s",
    "heard s ago",
)
_OWNERS: Final = ("peer", "layers", "device", "KV tokens", "state", "standby", "predicted ms", "measured ms")
_PLANS: Final = ("plan", "model", "owners", "standbys", "state", "predicted ms")

_BLANK: Final = ("",) * 5

_NAMED: Final = 4
_PLANS_SHOWN: Final = 20
"""Longer lists end in a count: `--json` has all of it."""


def peers(values: Sequence[Mapping[str, Any]]) -> str:
    return render.table(_PEERS, map(_peer, values))


def _peer(peer: Mapping[str, Any]) -> Sequence[object]:
    link = peer.get("link") or {}
    return (
        name(peer),
        str(peer.get("peer", "-"))[:8],
        peer.get("device", "-"),
        render.amount(peer.get("memory_bytes")),
        render.spans(peer.get("spans")),
        _link(link),
        _ms(link.get("round_trip_us")),
        "-" if link.get("kbit_s") is None else f"{link['kbit_s'] / 1000:.0f}",
        "-" if peer.get("heard_s") is None else f"{peer['heard_s']:.1f}",
    )


def _link(link: Mapping[str, Any]) -> str:
    """Nothing for a peer that others watch: in a large mesh, each watches a few."""
    if not link:
        return "-"
    return "broken" if link.get("broken") else "up"


def plan(value: Mapping[str, Any]) -> Iterator[str]:
    """Blocks of text, for `/api/plan` as it came."""
    if value.get("plan"):
        yield from _plan(value)
    else:
        yield _no_plan(value)
    yield from _fetching(value)
    yield from _plans(value)


def name(peer: Mapping[str, Any]) -> str:
    return str(peer.get("name") or str(peer.get("peer"))[:8]) + (" (here)" if peer.get("self") else "")


def _no_plan(value: Mapping[str, Any]) -> str:
    lines = [f"there is no plan: {value.get('reason') or 'no model is known here'}"]
    for shortage in value.get("by_peer") or ():
        lines.append(f"  {name(shortage)}: {render.amount(shortage.get('available_bytes'))}")
    return render.safe("\n".join(lines))


def _plan(value: Mapping[str, Any]) -> Iterator[str]:
    yield render.safe(f"plan {str(value['plan'])[:12]} for {value.get('model_name')}, {_state(value)}")
    owners: Sequence[Mapping[str, Any]] = value.get("owners") or ()
    rows = [_owner(owner) for owner in owners]
    hops = value.get("hops") or {}
    count = hops.get("count", len(owners) + 1)
    rows.append((f"{count} hops", *_BLANK, *_both(hops, count)))
    planned = " as planned" if value.get("predicted_us") is None else ""
    rows.append((f"whole route{planned}", *_BLANK, _ms(_predicted_us(value)), _ms(value.get("measured_us"))))
    yield render.table(_OWNERS, rows)
    if value.get("measured_steps"):
        head = (
            f"; besides, the output head here takes {_ms(value['head_us'])} ms"
            if value.get("head_us")
            else ""
        )
        yield f"measured over the last {value['measured_steps']} tokens asked here{head}"
    if value.get("reason"):
        yield render.safe(str(value["reason"]))


def _owner(owner: Mapping[str, Any]) -> Sequence[object]:
    standbys = ", ".join(map(_standby, owner.get("standbys") or ()))
    return (
        name(owner),
        render.span(owner.get("span")),
        owner.get("device", "-"),
        owner.get("pool_tokens", "-"),
        readiness(owner),
        standbys or "-",
        *_both(owner),
    )


def _standby(standby: Mapping[str, Any]) -> str:
    return f"{name(standby)} {render.span(standby.get('span'))} ({readiness(standby)})"


def readiness(holder: Mapping[str, Any]) -> str:
    """How far somebody is with their layers, in a word or two."""
    percent = holder.get("loaded_percent")
    state = str(holder.get("readiness") or "-")
    return f"{state} {percent} %" if percent is not None and state != "ready" else state


def _both(value: Mapping[str, Any], times: int = 1) -> tuple[str, str]:
    return _ms(value.get("predicted_us"), times), _ms(value.get("measured_us"), times)


def _predicted_us(plan: Mapping[str, Any]) -> int | None:
    """By today's figures; while an owner has none yet, by those that were assumed when the plan was made."""
    now_us: int | None = plan.get("predicted_us")
    return plan.get("planned_us") if now_us is None else now_us


def _ms(microseconds: int | None, times: int = 1) -> str:
    return render.milliseconds(None if microseconds is None else microseconds * times / 1000)


def _state(value: Mapping[str, Any]) -> str:
    return "in use" if value.get("usable") else "not ready yet"


def _fetching(value: Mapping[str, Any]) -> Iterator[str]:
    for what, size in (value.get("fetching") or {}).items():
        done, total = render.amount(size.get("done_bytes")), render.amount(size.get("total_bytes"))
        yield render.safe(f"this PC fetches {what}: {done} of {total}")


def _plans(value: Mapping[str, Any]) -> Iterator[str]:
    """The whole mesh's, where there are others than the one that was shown."""
    plans: Sequence[Mapping[str, Any]] = value.get("plans") or ()
    others = [each for each in plans if each.get("plan") != value.get("plan")]
    if not others:
        return
    shown = render.table(_PLANS, map(_brief, others[:_PLANS_SHOWN]))
    more = len(others) - _PLANS_SHOWN
    yield f"other plans of this mesh: {len(others)}\n{shown}" + (f"\n… and {more} more" if more > 0 else "")


def _brief(plan: Mapping[str, Any]) -> Sequence[object]:
    owners: Sequence[Mapping[str, Any]] = plan.get("owners") or ()
    named = ", ".join(f"{name(owner)} {render.span(owner.get('span'))}" for owner in owners[:_NAMED])
    more = len(owners) - _NAMED
    return (
        str(plan.get("plan"))[:12],
        plan.get("model_name", "-"),
        f"{named} and {more} more" if more > 0 else named,
        ", ".join(map(name, plan.get("standbys") or ())) or "-",
        "usable" if plan.get("usable") else _ready(owners),
        _ms(_predicted_us(plan)),
    )


def _ready(owners: Sequence[Mapping[str, Any]]) -> str:
    ready = sum(owner.get("readiness") == "ready" for owner in owners)
    return f"{ready} of {len(owners)} ready"
