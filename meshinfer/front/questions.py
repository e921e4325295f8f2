"""JSON from a client becomes a `Question`; values of the agent become JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshinfer.answer.question import Message, Question, SamplingParams
from meshinfer.errors import ModelError, ParameterError, UserError

DEFAULTS: Final[Mapping[str, float]] = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
"""What a person gets who says nothing. The model's whole distribution (temperature 1, nothing cut off) makes small
models ramble; these are near what other local programs use, a little calmer."""

_SAMPLING: Final = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_KNOWN: Final = _SAMPLING | {"messages", "model", "max_tokens", "stop", "plain", "ignore_eos"}


class UnknownModel(ModelError):
    """The model asked for is not on this mesh; `known` are those that are."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        names = ", ".join(known) or "none yet; get one with: meshinfer pull smollm2"
        super().__init__(f"there is no model {name[:80]!r} here; known: {names}")
        self.known = tuple(known)


def parse_object(data: bytes) -> dict[str, Any]:
    """Raises UserError unless `data` is one JSON object in UTF-8."""
    try:
        value = json.loads(data)
    except UnicodeDecodeError:
        raise UserError("the body is not UTF-8") from None
    except RecursionError:
        raise UserError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError:
        # Python converts no integer of more than 4,300 digits.
        raise UserError("the body holds a number that is too long") from None
    if not isinstance(value, dict):
        raise UserError("the body must be a JSON object")
    return value


def parse_question(body: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> Question:
    """Null means not given. Raises ParameterError (by name), PromptError or UnknownModel."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            raise ParameterError(
                name[:80], f"is not known; did you mean {near[0]}?" if near else "is not known"
            )
    chosen = {name: value for name, value in given.items() if name in _SAMPLING}
    sampling = SamplingParams(**{**DEFAULTS, **chosen})
    rest = {
        name: value for name, value in given.items() if name in ("max_tokens", "model", "plain", "ignore_eos")
    }
    question = Question(
        messages=_messages(given.get("messages")),
        sampling=sampling,
        stop=_stops(given.get("stop", ())),
        **rest,
    )
    if question.model is not None:
        _check_model(question.model, models)
    return question


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise ParameterError("messages", 'must be a list such as [{"role": "user", "content": "…"}]')
    messages = []
    for turn in value:
        if not isinstance(turn, dict) or not {"role", "content"} >= turn.keys() or len(turn) != 2:
            raise ParameterError("messages", 'must hold objects with "role" and "content"')
        messages.append(Message(turn["role"], turn["content"]))
    return tuple(messages)


def _stops(value: object) -> Any:
    """One text or a list of them; anything else is left for Question to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check_model(name: str, models: Sequence[Mapping[str, Any]]) -> None:
    names = {str(model["name"]) for model in models}
    ids = {str(model.get("model", "")) for model in models}
    if name not in names and name not in ids:
        raise UnknownModel(name, sorted(names))


def jsonable(value: object) -> Any:
    """Dataclasses become objects, a span's `last` the first layer that is not in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(content) for key, content in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(content) for content in value]
    return value
