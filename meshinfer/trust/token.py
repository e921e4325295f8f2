"""Making a mesh, inviting to it by a token of one line, and joining it.

    meshinfer1-<base64url of: format, invitation secret, mesh key, expires, mesh signature, addresses, check>

A token survives being pasted: white space, line breaks, quotes, invisible characters and punctuation around
it do no harm, and a mistyped or missing character is found by the check before anything else is said about
it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshinfer.errors import TokenError, TrustError
from meshinfer.limits import TOKEN_ADDRESSES, TOKEN_CHARS
from meshinfer.trust.certificate import LATEST, Invitation, Member, issue, verify
from meshinfer.trust.identity import Identity, SigningKey, mesh_id, sealed, unsealed
from meshinfer.values import MeshId

PREFIX: Final = "meshinfer1-"
_FIELDS: Final = struct.Struct(">B32s32sQ64s")
_CHECK_BYTES: Final = 4
_MESH_KEY_FILE: Final = b"meshinfer mesh key 1\n"
_MEMBERSHIP_FILE: Final = b"meshinfer membership 1\n"
_ADDRESS: Final = re.compile(r"[A-Za-z0-9._:\-\[\]]{1,255}")

_NOISE: Final = re.compile(r"[\s\u00ad\u200b-\u200f\u2060\ufeff]+")
"""What mail programs and chats put into a long line, or a terminal where it wraps."""
_AROUND: Final = " \t\r\n\"'`<>()[]{}.,;:!?«»“”„‘’…*"
_ANY_VERSION: Final = re.compile(r"meshinfer([0-9]+)-", re.IGNORECASE)


class MeshKey:
    """The root of one mesh: who holds it may invite. Made by `meshinfer mesh create`; never shows its
    secret."""

    __slots__ = ("mesh", "public", "signing")

    def __init__(self, signing: SigningKey) -> None:
        self.signing = signing
        self.public: bytes = signing.public
        self.mesh: MeshId = mesh_id(signing.public)

    @classmethod
    def from_seed(cls, seed: bytes) -> MeshKey:
        """The mesh of 32 random bytes."""
        return cls(SigningKey(seed))

    def to_bytes(self) -> bytes:
        """For a file that only its owner may read."""
        return sealed(_MESH_KEY_FILE, self.signing.secret_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> MeshKey:
        """Raises TokenError for anything but what `to_bytes` gave."""
        seed = unsealed(_MESH_KEY_FILE, data, "mesh key")
        if len(seed) != 32:
            raise TokenError("the stored mesh key is damaged: restore it from a backup")
        return cls.from_seed(seed)

    def __repr__(self) -> str:
        return f"MeshKey(mesh={self.mesh})"


@dataclass(frozen=True, slots=True)
class Membership:
    """This agent's place in one mesh; no secret. `addresses` are where members may be found."""

    mesh_public: bytes
    certificate: bytes
    addresses: tuple[str, ...]

    @property
    def mesh(self) -> MeshId:
        return mesh_id(self.mesh_public)

    def to_bytes(self) -> bytes:
        content = self.mesh_public + struct.pack(">H", len(self.certificate)) + self.certificate
        return sealed(_MEMBERSHIP_FILE, content + _pack_addresses(self.addresses))

    @classmethod
    def from_bytes(cls, data: bytes, identity: Identity, now_unix: float) -> Membership:
        """Raises TokenError for a damaged file, or for the membership of another identity."""
        content = unsealed(_MEMBERSHIP_FILE, data, "membership")
        try:
            (size,) = struct.unpack_from(">H", content, 32)
            found = cls(content[:32], content[34 : 34 + size], _parse_addresses(content[34 + size :]))
        except (struct.error, ValueError):
            raise TokenError("the stored membership is damaged: join the mesh again with a token") from None
        found.member(identity, now_unix)
        return found

    def member(self, identity: Identity, now_unix: float) -> Member:
        """This agent as others will see it. Raises TokenError where they would not accept it."""
        try:
            member = verify(self.certificate, self.mesh_public, now_unix)
        except TrustError as error:
            raise TokenError(f"{error}; join the mesh again with a token") from error
        if member.public != identity.public or member.curve_public != identity.curve_public:
            raise TokenError("the stored membership is another identity's: join the mesh again with a token")
        return member


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Token:
    """A token as read: checked for typing errors and signature, not for expiry. Never shows its secret."""

    invitation: Invitation
    key: SigningKey
    addresses: tuple[str, ...]

    @property
    def mesh(self) -> MeshId:
        return mesh_id(self.invitation.mesh_public)

    @property
    def expires(self) -> int:
        """Unix seconds."""
        return self.invitation.expires

    def __repr__(self) -> str:
        return f"Token(mesh={self.mesh}, expires={self.expires})"


def found_mesh(mesh_key: MeshKey, identity: Identity, name: str, now_unix: float) -> Membership:
    """The creator's own membership. The mesh's key invites itself, for this second only."""
    invitation = Invitation.make(mesh_key.signing, mesh_key.public, int(now_unix))
    certificate = issue(identity, name, invitation, mesh_key.signing, now_unix)
    return Membership(mesh_key.public, certificate, ())


def make_token(mesh_key: MeshKey, seed: bytes, expires_unix: float, addresses: Sequence[str] = ()) -> str:
    """A token for any number of agents until `expires_unix`. `seed` is 32 random bytes, fresh each time.

    `addresses` ("host:port" of doors) help where mDNS does not reach; the first `TOKEN_ADDRESSES` are taken.
    Raises TokenError for an address of another form.
    """
    key = SigningKey(seed)
    invitation = Invitation.make(mesh_key.signing, key.public, int(expires_unix))
    body = _FIELDS.pack(1, seed, mesh_key.public, invitation.expires, invitation.signature)
    body += _pack_addresses(tuple(addresses)[:TOKEN_ADDRESSES])
    return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")


def read_token(text: str) -> Token:
    """What a pasted token says. Raises TokenError, with a sentence that says what is wrong with it."""
    body = _body(_one_line(text))
    try:
        version, seed, mesh_public, expires, signature = _FIELDS.unpack_from(body)
        addresses = _parse_addresses(body[_FIELDS.size :])
    except (struct.error, ValueError):
        version = 0
    if version != 1 or expires > LATEST:
        raise TokenError("this token is not one that this meshinfer can read: update it, or ask for another")
    key = SigningKey(seed)
    invitation = Invitation(mesh_public, key.public, expires, signature)
    if not invitation.holds():
        raise TokenError("this token was not made by the mesh that it names: ask for a new one")
    return Token(invitation, key, addresses)


def join(text: str, identity: Identity, name: str, now_unix: float) -> Membership:
    """The membership that a token gives this agent. Raises TokenError for a damaged or expired one."""
    token = read_token(text)
    if now_unix > token.expires:
        raise TokenError(
            "this token has expired: ask for a new one (`meshinfer mesh token`), or check this PC's clock"
        )
    certificate = issue(identity, name, token.invitation, token.key, now_unix)
    return Membership(token.invitation.mesh_public, certificate, token.addresses)


def _one_line(text: str) -> str:
    """The token itself, whatever was pasted around it."""
    if len(text) > TOKEN_CHARS:
        raise TokenError(f"that is no mesh token: it has {len(text)} characters, a token has about 250")
    line = _NOISE.sub("", text).strip(_AROUND)
    version = _ANY_VERSION.search(line)
    if version is None:
        raise TokenError(f"that is no mesh token: a token begins with {PREFIX}")
    if version[1] != "1":
        raise TokenError(
            f"this token is of version {version[1][:4]}, this meshinfer reads version 1: update meshinfer"
        )
    return line[version.end() :].rstrip("=")


def _body(code: str) -> bytes:
    """The token's bytes, after their check."""
    damaged = (
        f"this token is damaged, a character is missing or wrong ({len(code)} came): copy it again, whole"
    )
    try:
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise TokenError(damaged) from None
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    # The last character may carry spare bits: only the one spelling is accepted.
    spelled = base64.urlsafe_b64encode(data).decode().rstrip("=")
    if _check(body) != check or spelled != code:
        raise TokenError(damaged)
    return body


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"meshinfer token\0" + body).digest()[:_CHECK_BYTES]


def _pack_addresses(addresses: Sequence[str]) -> bytes:
    for address in addresses:
        if not _ADDRESS.fullmatch(address):
            raise TokenError(f"not an address of the form host:port: {address[:64]!r}")
    return bytes([len(addresses)]) + b"".join(bytes([len(one)]) + one.encode() for one in addresses)


def _parse_addresses(data: bytes) -> tuple[str, ...]:
    """Raises ValueError for anything but what `_pack_addresses` gave."""
    found: list[str] = []
    at = 1
    while at < len(data):
        end = at + 1 + data[at]
        found.append(data[at + 1 : end].decode("ascii"))
        at = end
    if at != len(data) or data[0] != len(found) or not all(map(_ADDRESS.fullmatch, found)):
        raise ValueError("addresses")
    return tuple(found)
