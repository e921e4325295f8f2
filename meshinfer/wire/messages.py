"""Every message that agents exchange, as frozen values. PROTOCOL.md says how they look as bytes.

The table is closed: what is not here is refused. `Step`, `Result` and `Blob` carry memory that is never
copied, so they compare by identity; compare their encoded frames where equality is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from meshinfer.values import Mark, ModelId, PeerId, PlanId, Ports

Rows = npt.NDArray[np.floating[Any]]
"""Hidden states, `[rows, hidden]`, C-contiguous, f32 or f16."""


# ── door: between strangers, in the clear ───────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Knock:
    """A stranger presents itself. `program` is its version for people, `certificate` what `trust` made."""

    version: int
    program: str
    certificate: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a member of the same mesh: who is here, and where its encrypted sockets are."""

    version: int
    program: str
    certificate: bytes
    ports: Ports
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to anybody else, in one sentence. A peer of another version can read its version."""

    version: int
    program: str
    reason: str


# ── control ─────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class SignedAdvert:
    """An advert as its author signed it, and the author's certificate, so that whoever gets it can check both. The
    bytes travel unchanged from peer to peer, because the signature covers them."""

    certificate: bytes
    payload: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Adverts:
    """News of any peers, from any peer: at least one, and as many as fit into a header."""

    adverts: tuple[SignedAdvert, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive, and this is how it hears the receiver.

    `count` goes up by one with each heartbeat to this receiver in this incarnation. `echo` is the newest count heard
    from the receiver (0: none yet) and `echo_age_us` how long ago that was: the receiver has the round trip from it.
    `digest` sums up the newest adverts that the sender knows; 8 bytes.
    """

    incarnation: int
    count: int
    echo: int
    echo_age_us: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """Which adverts the sender knows, in order of peer id. The receiver sends what is newer there; where
    `reply` is set, it answers with its own summary too."""

    marks: tuple[Mark, ...]
    reply: bool


@dataclass(frozen=True, slots=True)
class Ping:
    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a `Ping`, with its token."""

    token: int


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Entry:
    """One sequence's part of a step: `count` rows from `position` on; the last `want` of them come back."""

    sequence: int
    position: int
    count: int
    want: int


@dataclass(frozen=True, slots=True)
class HopTrace:
    """What one owner measured for one step: µs waiting and computing, and the tokens in its batch."""

    queue_us: int
    compute_us: int
    batch_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One pass of a batch through the owners on `route`; `hop` is the index of the one that receives it.

    Each owner runs its span, appends one `HopTrace` (`trace` has `hop` of them) and sends it on, `hop + 1`.
    `rows` is `[sum of counts, hidden]`, entry after entry. `step` is the asker's own number for the round.
    """

    plan: PlanId
    route: tuple[PeerId, ...]
    hop: int
    asker: PeerId
    step: int
    entries: tuple[Entry, ...]
    trace: tuple[HopTrace, ...]
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The last owner's answer to the asker: `rows` is `[sum of wants, hidden]`, entry after entry."""

    plan: PlanId
    step: int
    entries: tuple[Entry, ...]
    trace: tuple[HopTrace, ...]
    rows: Rows


class RefusalReason(IntEnum):
    """Why an owner did not run a step. The numbers are the protocol's."""

    NOT_ACCEPTED = 1
    """The owner does not serve under this plan, or not yet, or no longer."""
    MISSING_KV = 2
    """It lacks KV before `position`; `held` says how many tokens it has, entry by entry."""
    POOL_FULL = 3
    OVERLOADED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Refusal:
    """An owner's no, straight to the asker. `hop` is the one that refused.

    `held` is empty, or the tokens that it has of each entry's sequence, in the step's order.
    """

    plan: PlanId
    step: int
    hop: int
    reason: RefusalReason
    detail: str
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """The asker is done with these sequences (one at least): their KV may go."""

    sequences: tuple[int, ...]


# ── bulk ────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for `length` bytes from `offset` of the blob whose SHA-256 is `digest`; `request` comes back."""

    model: ModelId
    digest: bytes
    offset: int
    length: int
    request: int


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """A part of a blob of `total` bytes; `body` begins at `offset`."""

    request: int
    digest: bytes
    offset: int
    total: int
    body: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Missing:
    """The peer does not have that blob."""

    request: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Bytes that mean nothing: how long they take tells the link's bandwidth."""

    token: int
    body: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to a `Probe`, when all of it has come."""

    token: int


DoorMessage = Knock | Welcome | Refused
ControlMessage = Adverts | Heartbeat | Summary | Ping | Pong
DataMessage = Step | Result | Refusal | Free
BulkMessage = Fetch | Blob | Missing | Probe | Probed
Message = DoorMessage | ControlMessage | DataMessage | BulkMessage


class Code(IntEnum):
    """The message types' numbers, the second field of every header; none is ever used again."""

    KNOCK = 1
    WELCOME = 2
    REFUSED = 3
    PING = 18
    PONG = 19
    ADVERTS = 21
    HEARTBEAT = 22
    SUMMARY = 23
    STEP = 32
    RESULT = 33
    REFUSAL = 34
    FREE = 35
    FETCH = 48
    BLOB = 49
    MISSING = 50
    PROBE = 51
    PROBED = 52
