"""If these fail, a stranger is let in, a member is kept out, or one peer passes for another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import TrustError
from meshinfer.limits import CERTIFICATE_BYTES, CLOCK_SKEW_S, DOOR_BYTES
from meshinfer.trust.certificate import Invitation, Member, issue, verify
from meshinfer.trust.identity import Identity, SigningKey, signature_holds
from meshinfer.trust.roster import Roster
from meshinfer.trust.token import MeshKey, found_mesh, join, make_token, read_token

NOW = 1_800_000_000.0
MESH = MeshKey.from_seed(bytes([7]) * 32)
OTHER_MESH = MeshKey.from_seed(bytes([8]) * 32)
TOKEN = make_token(MESH, bytes([9]) * 32, NOW + 3600)


def somebody(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(4, "big") * 16)


ANN, BOB, EVE = somebody(1), somebody(2), somebody(3)
CERTIFICATE = join(TOKEN, BOB, "Bob", NOW).certificate


def kind_of(certificate: bytes, now: float = NOW) -> str:
    with pytest.raises(TrustError) as caught:
        verify(certificate, MESH.public, now)
    return caught.value.kind


# ── certificates ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_certificate_of_the_longest_name_fits_its_bound() -> None:
    certificate = join(TOKEN, BOB, "🖥" * 200, NOW).certificate
    assert len(certificate) <= CERTIFICATE_BYTES <= DOOR_BYTES // 2
    assert verify(certificate, MESH.public, NOW).name == "🖥" * 64


def test_every_bit_and_every_byte_of_a_certificate_counts() -> None:
    for at in range(len(CERTIFICATE)):
        for bit in (1, 0x80):
            kind_of(CERTIFICATE[:at] + bytes([CERTIFICATE[at] ^ bit]) + CERTIFICATE[at + 1 :])
        kind_of(CERTIFICATE[:at])
    assert kind_of(CERTIFICATE + b"\0") == "format"
    assert kind_of(CERTIFICATE + bytes(CERTIFICATE_BYTES)) == "format"
    assert kind_of(b"\x02" + CERTIFICATE[1:]) == "version"


@given(st.binary(max_size=CERTIFICATE_BYTES))
def test_random_bytes_are_no_certificate(data: bytes) -> None:
    kind_of(data)
    kind_of(b"\x01" + data)


def test_a_certificate_of_another_mesh_is_told_from_a_forged_one() -> None:
    theirs = join(make_token(OTHER_MESH, bytes(32), NOW), BOB, "Bob", NOW).certificate
    assert kind_of(theirs) == "mesh"


def test_an_invitation_that_its_mesh_never_signed_admits_nobody() -> None:
    key = SigningKey(bytes([5]) * 32)
    genuine = Invitation.make(OTHER_MESH.signing, key.public, int(NOW))
    forged = Invitation(MESH.public, key.public, int(NOW), genuine.signature)
    assert kind_of(issue(EVE, "Eve", forged, key, NOW)) == "signature"


def test_a_member_cannot_admit_others_with_its_own_key() -> None:
    """A certificate is no invitation: the key that signs adverts signs no member in."""
    invitation = read_token(TOKEN).invitation
    assert kind_of(issue(EVE, "Eve", invitation, SigningKey(bytes([3]) * 32), NOW)) == "signature"


def test_nobody_can_be_given_another_curve_key_by_one_who_holds_a_token() -> None:
    """Else whoever was invited could take any member's place."""
    token = read_token(TOKEN)

    class Impostor:
        """Bob's public key and Eve's CURVE key, signed by Eve."""

        public = BOB.public
        curve_public = EVE.curve_public
        sign = staticmethod(EVE.sign)

    forged = issue(Impostor(), "Bob", token.invitation, token.key, NOW)  # type: ignore[arg-type]
    assert kind_of(forged) == "signature"


def test_who_joined_after_the_end_is_refused_and_who_joined_before_stays() -> None:
    token = read_token(TOKEN)
    assert kind_of(issue(EVE, "Eve", token.invitation, token.key, NOW + 3601), NOW + 3601) == "expired"
    assert verify(CERTIFICATE, MESH.public, NOW + 10**8).name == "Bob"


def test_a_certificate_from_the_future_names_the_clock() -> None:
    assert verify(CERTIFICATE, MESH.public, NOW - CLOCK_SKEW_S).peer == BOB.peer
    with pytest.raises(TrustError, match="clock"):
        verify(CERTIFICATE, MESH.public, NOW - CLOCK_SKEW_S - 1)


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\u202eevil", "\xff"])
def test_a_name_that_would_harm_a_terminal_is_cleaned_here_and_refused_there(name: str) -> None:
    clean = verify(join(TOKEN, BOB, name, NOW).certificate, MESH.public, NOW).name
    assert clean.isprintable()
    dirty = bytearray(join(TOKEN, BOB, "Bob", NOW).certificate)
    at = dirty.index(b"Bob")
    dirty[at : at + 3] = b"\x1b[J"
    assert kind_of(bytes(dirty)) == "format"


def test_a_signature_for_one_purpose_is_none_for_another() -> None:
    signature = BOB.sign(b"payload", b"one purpose")
    assert signature_holds(BOB.public, b"one purpose", b"payload", signature)
    assert not signature_holds(BOB.public, b"another", b"payload", signature)
    assert not signature_holds(BOB.public, b"one", b" purpose\0payload", signature)


# ── roster ──────────────────────────────────────────────────────────────────────────────────────────────────
def roster_of(*people: tuple[Identity, str], capacity: int = 8) -> Roster:
    roster = Roster(MESH.public, capacity)
    for identity, name in people:
        roster.admit(join(TOKEN, identity, name, NOW).certificate, NOW)
    return roster


def test_a_member_is_found_by_both_its_keys_and_a_stranger_by_none() -> None:
    roster = roster_of((BOB, "Bob"))
    creator = roster.admit(found_mesh(MESH, ANN, "Ann", NOW).certificate, NOW)
    assert roster.by_curve(BOB.curve_public) == roster.by_peer(BOB.peer) != creator
    assert roster.by_peer(ANN.peer) == creator
    assert roster.by_curve(EVE.curve_public) is None
    assert roster.by_peer(EVE.peer) is None
    assert {member.name for member in roster} == {"Ann", "Bob"}


def test_signatures_are_told_apart() -> None:
    roster = roster_of((BOB, "Bob"))
    signature = BOB.sign(b"advert")
    assert roster.verify_signature(BOB.peer, b"advert", signature)
    assert not roster.verify_signature(BOB.peer, b"Advert", signature)
    assert not roster.verify_signature(BOB.peer, b"advert", signature[:-1])
    assert not roster.verify_signature(BOB.peer, b"advert", EVE.sign(b"advert"))
    assert not roster.verify_signature(EVE.peer, b"advert", EVE.sign(b"advert"))


def test_a_full_roster_keeps_its_members_and_refuses_strangers() -> None:
    """100,000 people with one leaked token push nobody out."""
    roster = roster_of(*((somebody(n), str(n)) for n in range(10, 14)), capacity=4)
    for n in range(20, 40):
        with pytest.raises(TrustError, match="full"):
            roster.admit(join(TOKEN, somebody(n), str(n), NOW).certificate, NOW)
    assert len(roster) == 4
    renamed = roster.admit(join(TOKEN, somebody(10), "new name", NOW + 1).certificate, NOW + 1)
    assert roster.by_peer(somebody(10).peer) == renamed


def test_a_newer_certificate_replaces_and_an_older_one_changes_nothing() -> None:
    roster = roster_of((BOB, "Bob"))
    newer = join(TOKEN, BOB, "Robert", NOW + 5).certificate
    assert roster.admit(newer, NOW).name == "Robert"
    assert roster.admit(CERTIFICATE, NOW).name == "Robert"
    assert [member.name for member in roster] == ["Robert"]


def test_a_new_curve_key_closes_the_door_to_the_old_one() -> None:
    roster = roster_of((BOB, "Bob"))
    moved = Identity(SigningKey((2).to_bytes(4, "big") * 8), bytes([77]) * 32)
    assert moved.peer == BOB.peer
    roster.admit(join(TOKEN, moved, "Bob", NOW + 5).certificate, NOW)
    assert roster.by_curve(BOB.curve_public) is None
    assert roster.by_curve(moved.curve_public) == roster.by_peer(BOB.peer)


def test_a_curve_key_belongs_to_the_first_who_showed_it() -> None:
    roster = roster_of((BOB, "Bob"))
    thief = Identity(SigningKey(bytes([66]) * 32), BOB.curve_secret)
    with pytest.raises(TrustError, match="another member"):
        roster.admit(join(TOKEN, thief, "Bob", NOW + 9).certificate, NOW)
    member = roster.by_curve(BOB.curve_public)
    assert isinstance(member, Member)
    assert member.peer == BOB.peer
    assert roster.by_peer(thief.peer) is None


def test_a_refused_certificate_leaves_the_roster_as_it_was() -> None:
    roster = roster_of((BOB, "Bob"))
    before = list(roster)
    for bad in (b"", CERTIFICATE[:-1], bytes(341)):
        with pytest.raises(TrustError):
            roster.admit(bad, NOW)
    assert list(roster) == before


def test_the_curve_key_is_one_that_the_sockets_use() -> None:
    """libzmq's CURVE keys are raw X25519; if that were not so, nobody could connect."""
    zmq = pytest.importorskip("zmq")
    z85 = pytest.importorskip("zmq.utils.z85")
    assert z85.decode(zmq.curve_public(z85.encode(BOB.curve_secret))) == BOB.curve_public
