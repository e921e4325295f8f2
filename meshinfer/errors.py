"""One small tree of errors. Each message is one sentence for a person: what happened, and what to do."""

from __future__ import annotations


class MeshinferError(Exception):
    """Whatever this program reports on purpose; anything else is a defect."""

    exit_code = 1


class UserError(MeshinferError):
    """The person can put it right: a wrong name, option, file or setting."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is not understood; names the key and where it stands."""


class ModelError(UserError):
    """A model is unknown, damaged, or of a kind that cannot be served."""


class PromptError(UserError):
    """A prompt is empty, or longer than what fits; both lengths are named."""


class ParameterError(UserError):
    """A parameter of a question is mistyped or out of range; `parameter` is its name, for an interface to point at."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter} {problem}")
        self.parameter = parameter


class TokenError(UserError):
    """A mesh token is damaged, expired, or for another mesh."""


class CapacityError(MeshinferError):
    """Too little memory; the message holds needed and available, by peer."""


class RouteError(MeshinferError):
    """No route holds all layers now; names the layers that are missing."""


class StepError(MeshinferError):
    """An owner could not run a step; the answer it belonged to ends or goes another way."""


class BusyError(MeshinferError):
    """Too many questions wait already; worth asking again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrustError(MeshinferError):
    """A peer's certificate or signature does not hold. `kind` is a short stable word for counters."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WireError(MeshinferError):
    """Bytes from a peer that are no message. `kind` is a short stable word for counters."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class VersionError(WireError):
    """A peer speaks another protocol version; both are named."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(
            "version",
            f"the peer speaks protocol version {theirs}, this program speaks {ours}: update the older of the two",
        )
        self.theirs = theirs
        self.ours = ours


class DoorError(MeshinferError):
    """Knocking at an agent's door came to nothing; says at which address and why."""
