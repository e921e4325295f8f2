"""Certificates: the mesh's key signs an invitation, its key and the peer's own sign the member.

    mesh key ──signs──▶ invitation (a key, until when) ──signs──▶ certificate (peer key, CURVE key, name)
                                                    peer key ──signs──▶ the same

The peer's own signature keeps somebody with an invitation from binding another peer's name to a CURVE key
of theirs. The layout is fixed, every field at its place, so one certificate has one encoding and reading
takes no parser (big-endian, lengths in bytes):

    format 1 | mesh 32 | invitation key 32 | expires 8 | mesh signature 64
             | peer key 32 | CURVE key 32 | issued at 8 | name length 2 | name
             | peer signature 64 | invitation signature 64

Each signature covers a word for its purpose (`identity.signed_bytes`) and all that stands before it,
beginning at the format byte; the mesh's covers its own three fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from meshinfer.errors import TrustError
from meshinfer.limits import CERTIFICATE_BYTES, CLOCK_SKEW_S, NAME_CHARS
from meshinfer.text import is_printable, printable
from meshinfer.trust.identity import (
    SIGNATURE_BYTES,
    Identity,
    SigningKey,
    mesh_id,
    peer_id,
    signature_holds,
)
from meshinfer.values import MeshId, PeerId

FORMAT: Final = 1
_INVITATION: Final = b"meshinfer invitation 1"
_MEMBER: Final = b"meshinfer member 1"
_ADMISSION: Final = b"meshinfer admission 1"

_INVITATION_FIELDS: Final = struct.Struct(">32s32sQ64s")
_HEAD: Final = struct.Struct(f">B{_INVITATION_FIELDS.size}s32s32sQH")
LATEST: Final = 2**53
"""No time in seconds is beyond this; it fits a double exactly."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the mesh's key signed: who holds this key's secret may admit members until `expires` (Unix s)."""

    mesh_public: bytes
    public: bytes
    expires: int
    signature: bytes

    @classmethod
    def make(cls, mesh: SigningKey, public: bytes, expires: int) -> Invitation:
        unsigned = struct.pack(">32s32sQ", mesh.public, public, expires)
        return cls(mesh.public, public, expires, mesh.sign(_INVITATION, unsigned))

    def to_bytes(self) -> bytes:
        return _INVITATION_FIELDS.pack(self.mesh_public, self.public, self.expires, self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        """`data` has exactly `INVITATION_BYTES`; nothing is verified yet."""
        return cls(*_INVITATION_FIELDS.unpack(data))

    def holds(self) -> bool:
        """Whether the mesh's key signed it."""
        unsigned = self.to_bytes()[:-SIGNATURE_BYTES]
        return signature_holds(self.mesh_public, _INVITATION, unsigned, self.signature)


INVITATION_BYTES: Final = _INVITATION_FIELDS.size


@dataclass(frozen=True, slots=True)
class Member:
    """Somebody whose certificate was verified. `certificate` is the bytes, to store and to show to others."""

    peer: PeerId
    mesh: MeshId
    public: bytes
    curve_public: bytes
    name: str
    issued_at: int
    certificate: bytes


def issue(identity: Identity, name: str, invitation: Invitation, key: SigningKey, now_unix: float) -> bytes:
    """This agent's certificate, under 1 KiB. `key` is the invitation's secret; the name is cleaned."""
    text = printable(name, NAME_CHARS).encode()
    issued = int(now_unix)
    head = _HEAD.pack(
        FORMAT, invitation.to_bytes(), identity.public, identity.curve_public, issued, len(text)
    )
    content = head + text
    own = identity.sign(content, _MEMBER)
    return content + own + key.sign(_ADMISSION, content + own)


def verify(certificate: bytes, mesh_public: bytes, now_unix: float) -> Member:
    """The member that this certificate admits to the mesh with this key. Raises TrustError.

    Checks the layout, the mesh, that it was issued before its invitation ran out and not in the future, and
    the three signatures. These come last: a stranger's bytes cost that much only once all else is right.
    """
    member, invitation, content, own, admission = _split(certificate)
    if invitation.mesh_public != mesh_public:
        raise TrustError("mesh", "the peer belongs to another mesh")
    if member.issued_at > invitation.expires:
        raise TrustError("expired", f"{member.name or member.peer} joined with a token that had expired")
    if member.issued_at > now_unix + CLOCK_SKEW_S:
        raise TrustError(
            "clock",
            f"the certificate of {member.name or member.peer} is from the future: set both PCs' clocks",
        )
    if not (
        invitation.holds()
        and signature_holds(member.public, _MEMBER, content, own)
        and signature_holds(invitation.public, _ADMISSION, content + own, admission)
    ):
        raise TrustError("signature", "a signature in the peer's certificate does not hold")
    return member


def _split(certificate: bytes) -> tuple[Member, Invitation, bytes, bytes, bytes]:
    """(member, invitation, signed content, peer's signature, invitation's signature), nothing verified."""
    if not _HEAD.size + 2 * SIGNATURE_BYTES <= len(certificate) <= CERTIFICATE_BYTES:
        raise TrustError("format", f"a certificate does not have {len(certificate)} bytes")
    version, invited, public, curve, issued, length = _HEAD.unpack_from(certificate)
    if version != FORMAT:
        raise TrustError("version", f"the certificate has format {version}, this program reads {FORMAT}")
    end = _HEAD.size + length
    if len(certificate) != end + 2 * SIGNATURE_BYTES:
        raise TrustError("format", "the certificate is cut short, or something follows it")
    invitation = Invitation.from_bytes(invited)
    if issued > LATEST or invitation.expires > LATEST:
        raise TrustError("format", "the certificate has a time that cannot be")
    member = Member(
        peer_id(public),
        mesh_id(invitation.mesh_public),
        public,
        curve,
        _name(certificate[_HEAD.size : end]),
        issued,
        certificate,
    )
    own = end + SIGNATURE_BYTES
    return member, invitation, certificate[:end], certificate[end:own], certificate[own:]


def _name(data: bytes) -> str:
    try:
        name = data.decode()
    except UnicodeDecodeError:
        raise TrustError("format", "the certificate's name is not UTF-8") from None
    if not is_printable(name, NAME_CHARS):
        raise TrustError("format", f"the certificate's name is not at most {NAME_CHARS} printable characters")
    return name
