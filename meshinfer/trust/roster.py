"""The members of this agent's mesh that it has met: who may connect, and whose signature is whose.

Only certificates that verify get in, and there is room for a fixed number; when it is full, strangers stay
out and members stay in.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshinfer.errors import TrustError
from meshinfer.limits import ROSTER_MEMBERS
from meshinfer.trust.certificate import Member, verify
from meshinfer.trust.identity import ADVERT, mesh_id, signature_holds
from meshinfer.values import MeshId, PeerId


class Roster:
    """Members by peer and by CURVE key, each of which belongs to one member only."""

    def __init__(self, mesh_public: bytes, capacity: int = ROSTER_MEMBERS) -> None:
        self.mesh: MeshId = mesh_id(mesh_public)
        self._mesh_public = mesh_public
        self._capacity = capacity
        self._by_peer: dict[PeerId, Member] = {}
        self._by_curve: dict[bytes, Member] = {}
        self._by_certificate: dict[bytes, Member] = {}
        """Who knocks again is recognised without verifying three signatures again."""

    def __len__(self) -> int:
        return len(self._by_peer)

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._by_peer.values()))

    def by_peer(self, peer: PeerId) -> Member | None:
        return self._by_peer.get(peer)

    def by_curve(self, public: bytes) -> Member | None:
        """The member with this CURVE public key (32 bytes), or None: it may not connect."""
        return self._by_curve.get(public)

    def admit(self, certificate: bytes, now_unix: float) -> Member:
        """The member whose certificate this is, met now or before. Raises TrustError; then nothing has
        changed.

        A member that shows a newer certificate (a new name, a new CURVE key) is known by that from now on;
        one that is older than the known one changes nothing, so that nobody can be set back by a replay.
        """
        known = self._by_certificate.get(certificate)
        if known is not None:
            return known
        member = verify(certificate, self._mesh_public, now_unix)
        known_as = self._by_peer.get(member.peer)
        if known_as is not None and known_as.issued_at >= member.issued_at:
            return known_as
        self._check_room(member, known_as)
        if known_as is not None:
            del self._by_curve[known_as.curve_public]
            del self._by_certificate[known_as.certificate]
        self._by_peer[member.peer] = member
        self._by_curve[member.curve_public] = member
        self._by_certificate[member.certificate] = member
        return member

    def verify_signature(
        self, peer: PeerId, payload: bytes, signature: bytes, purpose: bytes = ADVERT
    ) -> bool:
        """Whether this member signed `payload` for this purpose; False for a stranger."""
        member = self._by_peer.get(peer)
        return member is not None and signature_holds(member.public, purpose, payload, signature)

    def _check_room(self, member: Member, known_as: Member | None) -> None:
        holder = self._by_curve.get(member.curve_public)
        if holder is not None and holder.peer != member.peer:
            raise TrustError("curve", f"{member.name or member.peer} shows the CURVE key of another member")
        if known_as is None and len(self._by_peer) >= self._capacity:
            raise TrustError("full", f"the roster is full: it has room for {self._capacity} members")
