"""The files that say who this agent is and which mesh it belongs to.

`identity.key`, `membership`, and `mesh.key` where the mesh was created. What they hold is decided in `trust`;
here they are read and written, whole and for their owner only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from meshinfer.agent.files import private_directory, read_bounded, write_atomic
from meshinfer.errors import UserError
from meshinfer.trust import token as tokens
from meshinfer.trust.identity import Identity
from meshinfer.trust.token import Membership, MeshKey

IDENTITY_FILE: Final = "identity.key"
MEMBERSHIP_FILE: Final = "membership"
MESH_KEY_FILE: Final = "mesh.key"

Entropy = Callable[[int], bytes]
"""So many random bytes, fit for keys."""


def load_or_create_identity(home: Path, entropy: Entropy = secrets.token_bytes) -> Identity:
    """The identity of this home, made at the first call. Raises TokenError if its file is damaged."""
    data = read_bounded(home / IDENTITY_FILE)
    if data is not None:
        return Identity.from_bytes(data)
    identity = Identity.from_seed(entropy(64))
    private_directory(home)
    write_atomic(home / IDENTITY_FILE, identity.to_bytes(), secret=True)
    return identity


def is_member(home: Path) -> bool:
    """Whether this home belongs to a mesh, or did when last somebody looked; nothing is verified."""
    return (home / MEMBERSHIP_FILE).exists()


def load_membership(home: Path, identity: Identity, now_unix: float | None = None) -> Membership | None:
    """None where this home is in no mesh. Raises TokenError for a damaged file, or another identity's."""
    data = read_bounded(home / MEMBERSHIP_FILE)
    return None if data is None else Membership.from_bytes(data, identity, _now(now_unix))


def load_mesh_key(home: Path) -> MeshKey | None:
    """The root of the mesh that was created here, if one was."""
    data = read_bounded(home / MESH_KEY_FILE)
    return None if data is None else MeshKey.from_bytes(data)


def create_mesh(
    home: Path,
    name: str,
    *,
    replace: bool = False,
    now_unix: float | None = None,
    entropy: Entropy = secrets.token_bytes,
) -> Membership:
    """Makes a mesh and its first member, this home.

    Raises UserError if it belongs to one already and `replace` is not set.
    The key of a mesh that is replaced is kept beside the new one: others may still be members of it.
    """
    identity = load_or_create_identity(home, entropy)
    before = load_membership(home, identity, now_unix)
    if before is not None and not replace:
        raise UserError(
            f"this PC already belongs to mesh {before.mesh[:8]}; to leave it for a new one, add --replace"
        )
    old_key = load_mesh_key(home)
    if old_key is not None:
        write_atomic(home / f"mesh-{old_key.mesh[:8]}.key", old_key.to_bytes(), secret=True)
    key = MeshKey.from_seed(entropy(32))
    membership = tokens.found_mesh(key, identity, name, _now(now_unix))
    # The key first: a membership without it could never invite anybody.
    write_atomic(home / MESH_KEY_FILE, key.to_bytes(), secret=True)
    write_atomic(home / MEMBERSHIP_FILE, membership.to_bytes(), secret=True)
    return membership


def make_token(
    home: Path, expires_unix: float, addresses: Sequence[str] = (), entropy: Entropy = secrets.token_bytes
) -> str:
    """A token of the mesh that was created here. Raises UserError where none was."""
    key = load_mesh_key(home)
    if key is None:
        raise UserError(
            "no mesh was created on this PC: make the token on the one where it was, "
            "or create one with: meshinfer mesh create"
        )
    return tokens.make_token(key, entropy(32), expires_unix, addresses)


def join(
    home: Path,
    text: str,
    name: str,
    *,
    replace: bool = False,
    now_unix: float | None = None,
    entropy: Entropy = secrets.token_bytes,
) -> Membership:
    """Puts this home on the token's mesh's roster. Raises TokenError, or UserError if it is in another."""
    identity = load_or_create_identity(home, entropy)
    before = load_membership(home, identity, now_unix)
    membership = tokens.join(text, identity, name, _now(now_unix))
    if before is not None and before.mesh != membership.mesh and not replace:
        raise UserError(
            f"this PC belongs to mesh {before.mesh[:8]}, the token is for {membership.mesh[:8]}; "
            "to leave the one for the other, add --replace"
        )
    write_atomic(home / MEMBERSHIP_FILE, membership.to_bytes(), secret=True)
    return membership


def ensure_membership(
    home: Path, identity: Identity, token: str | None, name: str, now_unix: float | None = None
) -> Membership | None:
    """What an agent calls at its start: the stored membership, or the one that the configured token gives.

    A token of the mesh that this home belongs to changes nothing, even expired; one of another mesh wins, for
    IT has put it there. Raises TokenError.
    """
    stored = load_membership(home, identity, now_unix)
    if token is None or (stored is not None and tokens.read_token(token).mesh == stored.mesh):
        return stored
    return join(home, token, name, replace=True, now_unix=now_unix)


def _now(now_unix: float | None) -> float:
    return time.time() if now_unix is None else now_unix
