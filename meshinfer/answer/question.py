"""What a person asks and what comes back: checked once, here, so that no later part need doubt it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from meshinfer import limits
from meshinfer.errors import ParameterError, PromptError
from meshinfer.values import PeerId, Span

TEMPERATURE_MAX: Final = 2.0
"""As in OpenAI's interface. Beyond it texts of any model are noise."""

PENALTY_MIN: Final = 0.1
PENALTY_MAX: Final = 10.0
"""Around 1 (no penalty). Further out, logits leave the range of f32 arithmetic."""

_GREEDY_BELOW: Final = 1e-5
"""Dividing f32 logits by less would overflow; nothing but the best token would be left anyway."""

SEED_MAX: Final = 2**64 - 1
ROLE_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is one that the model's template knows: system, user, …"""

    role: str
    content: str

    def __post_init__(self) -> None:
        """Raises `ParameterError` for a field that is no text."""
        _text("role", self.role)
        _text("content", self.content)
        if not 0 < len(self.role) <= ROLE_CHARS:
            raise ParameterError("role", f"must have 1 to {ROLE_CHARS} characters, not {len(self.role)}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The defaults leave the model's own distribution as it is.

    `temperature` 0 is greedy: the likeliest token, always. `top_k` 0 is off. `seed` None lets the agent draw
    one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises `ParameterError` for what is mistyped, NaN, negative or beyond its range."""
        for name, least, most in (
            ("temperature", 0.0, TEMPERATURE_MAX),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", PENALTY_MIN, PENALTY_MAX),
        ):
            object.__setattr__(self, name, _real(name, getattr(self, name), least, most))
        _whole("top_k", self.top_k, 0, limits.VOCABULARY)
        if self.seed is not None:
            _whole("seed", self.seed, 0, SEED_MAX)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Question:
    """One request for an answer.

    `max_tokens` None is the agent's bound (`limits.ANSWER_TOKENS`, or what context and memory leave of it).
    `model` None is the one that the mesh serves. `plain` asks for the single message's text to be continued
    as it stands, without the model's chat template. `ignore_eos` goes on to `max_tokens` past the model's own
    end, for measurements.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str | None = None
    plain: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises `PromptError` for an empty prompt, `ParameterError` for anything else that is wrong."""
        _check_messages(self.messages)
        if not isinstance(self.sampling, SamplingParams):
            raise ParameterError("sampling", "must be sampling parameters")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, limits.CONTEXT_TOKENS)
        _check_stops(self.stop)
        if self.model is not None:
            _text("model", self.model)
        if not isinstance(self.plain, bool):
            raise ParameterError("plain", "must be true or false")
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError("ignore_eos", "must be true or false")
        if self.plain and len(self.messages) != 1:
            raise ParameterError("plain", "takes exactly one message: a conversation needs the chat template")


class Finish(StrEnum):
    """Why an answer ended: the model or a stop string ended it, its bound was reached, or the person left."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StageStats:
    """One owner's part in an answer. Medians over its steps, milliseconds.

    `hop_ms_p50` is what lay between the stage before (or the asker) and this one: the network and its two
    ends.
    """

    peer: PeerId
    name: str
    span: Span
    device: str
    hops: int
    step_ms_p50: float
    queue_ms_p50: float
    hop_ms_p50: float


@dataclass(frozen=True, slots=True)
class Stats:
    """What an answer took. `tokens` were generated; `tokens_per_s` is over those after the first."""

    prompt_tokens: int
    tokens: int
    ttft_s: float
    total_s: float
    tokens_per_s: float
    route: tuple[StageStats, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer; never an empty one, never half a character."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The last thing that an answer yields."""

    finish: Finish
    stats: Stats


def _real(name: str, value: object, least: float, most: float) -> float:
    # bool is an int to Python, and no number to a person.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, f"must be a number, not {_kind(value)}")
    if not least <= value <= most:  # NaN fails every comparison
        raise ParameterError(name, f"must lie between {least:g} and {most:g}, not at {_short(value)}")
    return float(value)


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be a whole number, not {_kind(value)}")
    if not least <= value <= most:
        raise ParameterError(name, f"must lie between {least} and {most}, not at {_short(value)}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ParameterError(name, f"must be text, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ParameterError(name, "holds half of a surrogate pair, which is no character") from None


def _check_messages(messages: object) -> None:
    if not isinstance(messages, tuple) or not all(isinstance(message, Message) for message in messages):
        raise ParameterError("messages", "must be a list of messages")
    if not messages or not messages[-1].content.strip():
        raise PromptError("the prompt is empty: write what you would like to ask")


def _check_stops(stops: object) -> None:
    if not isinstance(stops, tuple):
        raise ParameterError("stop", f"must be a list of texts, not {_kind(stops)}")
    if len(stops) > limits.STOP_STRINGS:
        raise ParameterError("stop", f"may hold at most {limits.STOP_STRINGS} texts, not {len(stops)}")
    for stop in stops:
        _text("stop", stop)
        if not 0 < len(stop) <= limits.STOP_STRING_CHARS:
            raise ParameterError(
                "stop", f"must hold texts of 1 to {limits.STOP_STRING_CHARS} characters, not {len(stop)}"
            )


def _kind(value: object) -> str:
    return {"NoneType": "nothing", "bool": "true or false", "str": "text", "dict": "an object"}.get(
        type(value).__name__, type(value).__name__
    )


def _short(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"  # str() of a huge integer is refused by Python, or slow
    return str(value)
