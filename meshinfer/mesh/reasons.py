"""Why nothing can be asked now, in one sentence for a person."""

from __future__ import annotations

from meshinfer.mesh.picture import Picture
from meshinfer.mesh.placement import Shortfall
from meshinfer.values import ModelId, PeerId, Plan, Readiness

NO_MODEL = "no peer that is here has a model: run `meshinfer pull smollm2` on one of them"
SETTLING = "peers have just come, gone or changed: a plan is made as soon as that has settled"


def why_not(
    picture: Picture,
    me: PeerId,
    model: ModelId | None,
    known: bool,
    plan: Plan | None,
    shortfall: Shortfall | None,
) -> str:
    """Why no plan can be used; `known` is whether the model's description is here, `plan` what is awaited."""
    if model is None:
        return NO_MODEL
    if not known:
        return fetching(picture, model, picture.sources(model, me))
    if shortfall is not None:
        return lacking(picture, model, shortfall)
    return SETTLING if plan is None else waiting(picture, plan)


def fetching(picture: Picture, model: ModelId, sources: tuple[PeerId, ...]) -> str:
    name = picture.model_name(model)
    if not sources:
        return f"this agent does not have the description of {name}, and no peer that has it is here"
    return f"fetching the description of {name} from {_names(picture, sources)}"


def lacking(picture: Picture, model: ModelId, shortfall: Shortfall) -> str:
    sentence = f"{picture.model_name(model)} {shortfall.sentence(picture.names())}"
    for peer, detail in picture.failures(model):
        sentence += f"; {picture.name(peer)} could not load its layers: {detail or 'no reason was given'}"
    late = picture.without_manifest(model)
    if late:
        sentence += f"; waiting for {_names(picture, late)} to fetch the model's description"
    return sentence


def waiting(picture: Picture, plan: Plan) -> str:
    """Which owners are not ready yet, and how far they are."""
    parts = []
    for assignment in plan.assignments:
        readiness = picture.readiness(plan, assignment.peer)
        if readiness is Readiness.READY:
            continue
        state = "is gone" if picture.get(assignment.peer) is None else _STATES[readiness]
        name = picture.name(assignment.peer)
        parts.append(f"{name} (layers {assignment.span}) {state}")
    return "not ready yet: " + ", ".join(parts)


_STATES = {
    None: "has not accepted the plan yet",
    Readiness.ACCEPTED: "has accepted",
    Readiness.LOADING: "is loading",
    Readiness.READY: "is ready",
    Readiness.FAILED: "could not load",
}


def _names(picture: Picture, peers: tuple[PeerId, ...]) -> str:
    return ", ".join(map(picture.name, peers))
