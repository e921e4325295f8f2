"""If these fail, a colleague cannot join with the token he was sent, or somebody joins who should not."""

from __future__ import annotations

import base64
import hashlib
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import TokenError
from meshinfer.limits import TOKEN_ADDRESSES, TOKEN_CHARS
from meshinfer.trust.certificate import verify
from meshinfer.trust.identity import Identity, peer_id
from meshinfer.trust.token import PREFIX, Membership, MeshKey, found_mesh, join, make_token, read_token

NOW = 1_800_000_000.0
ANN = Identity.from_seed(bytes(range(64)))
BOB = Identity.from_seed(bytes(range(64, 128)))
MESH = MeshKey.from_seed(bytes([7]) * 32)
INVITE = bytes([9]) * 32
TOKEN = make_token(MESH, INVITE, NOW + 3600, ["192.168.1.20:7700", "[fd00::20]:7700", "pc-7.office:7700"])


def test_a_joined_member_is_who_it_says() -> None:
    membership = join(TOKEN, BOB, "Bob", NOW)
    member = verify(membership.certificate, MESH.public, NOW)
    assert (member.peer, member.curve_public, member.name) == (BOB.peer, BOB.curve_public, "Bob")
    assert member.mesh == membership.mesh == MESH.mesh
    assert membership.addresses == ("192.168.1.20:7700", "[fd00::20]:7700", "pc-7.office:7700")


def test_the_creator_is_a_member_and_leaves_no_open_invitation() -> None:
    membership = found_mesh(MESH, ANN, "Ann", NOW)
    assert verify(membership.certificate, MESH.public, NOW + 10**8).peer == ANN.peer
    assert membership.mesh == MESH.mesh


@pytest.mark.parametrize("wrap", [
    "{}", "  {}\n", '"{}"', "“{}”", "({}).", "`{}`,", "\ufeff{}\u200b", "{}.\r\n", "<{}>", "**{}**",
    "Token: {}", "meshinfer mesh join {}",
])  # fmt: skip
def test_a_token_survives_what_surrounds_it(wrap: str) -> None:
    assert read_token(wrap.format(TOKEN)).mesh == MESH.mesh


def test_a_token_survives_line_breaks_and_capitals_of_a_chat_program() -> None:
    wrapped = "\r\n    ".join(TOKEN[start : start + 40] for start in range(0, len(TOKEN), 40))
    assert read_token(wrapped).mesh == MESH.mesh
    assert read_token("\u200b".join(TOKEN)).mesh == MESH.mesh
    assert read_token("M" + TOKEN[1:]).mesh == MESH.mesh


def test_each_mistyped_missing_and_doubled_character_is_found() -> None:
    code = TOKEN[len(PREFIX) :]
    for at in range(len(code)):
        other = "A" if code[at] != "A" else "B"
        for wrong in (
            code[:at] + other + code[at + 1 :],
            code[:at] + code[at + 1 :],
            code[: at + 1] + code[at:],
        ):
            with pytest.raises(TokenError, match=r"damaged.*copy it again"):
                read_token(PREFIX + wrong)


def test_a_cut_token_is_found_at_every_length() -> None:
    for length in range(len(TOKEN)):
        with pytest.raises(TokenError):
            read_token(TOKEN[:length])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "begins with meshinfer1-"),
        ("hello", "begins with meshinfer1-"),
        ("meshinfer2-AAAA", "version 2.*update"),
        ("meshinfer" + "9" * 500 + "-AAAA", "version 9999,"),
        ("x" * (TOKEN_CHARS + 1), "characters"),
        (PREFIX, "damaged"),
        (PREFIX + "ä" * 9, "damaged"),
    ],
)
def test_what_is_no_token_is_told_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(TokenError, match=sentence) as caught:
        read_token(text)
    assert len(str(caught.value)) < 200


def test_an_expired_token_is_refused_to_the_second() -> None:
    assert join(TOKEN, BOB, "Bob", NOW + 3600).mesh == MESH.mesh
    with pytest.raises(TokenError, match="expired"):
        join(TOKEN, BOB, "Bob", NOW + 3601)


def resealed(at: int) -> str:
    """The token with one byte changed and its check made good: no slip, but a forgery."""
    from meshinfer.trust.token import _check

    code = TOKEN[len(PREFIX) :]
    data = bytearray(base64.urlsafe_b64decode(code + "=" * (-len(code) % 4))[:-4])
    data[at] ^= 1
    return PREFIX + base64.urlsafe_b64encode(bytes(data) + _check(bytes(data))).decode().rstrip("=")


@pytest.mark.parametrize(
    "at", [1, 33, 68, 72, 73, 130], ids=["secret", "mesh", "expires", "expires", "signature", "signature"]
)
def test_a_forged_token_is_refused(at: int) -> None:
    """Above all: a token's end cannot be put off."""
    with pytest.raises(TokenError, match="not made by the mesh"):
        read_token(resealed(at))


def test_addresses_are_bounded_and_of_one_form() -> None:
    many = make_token(MESH, INVITE, NOW, [f"10.0.0.{n}:7700" for n in range(20)])
    assert len(read_token(many).addresses) == TOKEN_ADDRESSES
    for bad in ("a b:1", "x\n:1", "", "ü:1", "h" * 256):
        with pytest.raises(TokenError, match="host:port"):
            make_token(MESH, INVITE, NOW, [bad])


@given(st.text(max_size=300))
def test_random_text_is_refused_and_nothing_worse(text: str) -> None:
    for given_text in (text, PREFIX + text):
        with pytest.raises(TokenError):
            read_token(given_text)


@given(st.binary(min_size=64, max_size=64), st.binary(min_size=32, max_size=32), st.text(max_size=80))
def test_any_identity_joins_any_mesh_under_any_name(seed: bytes, mesh: bytes, name: str) -> None:
    key = MeshKey.from_seed(mesh)
    identity = Identity.from_seed(seed)
    membership = join(make_token(key, seed[:32], NOW), identity, name, NOW)
    assert Membership.from_bytes(membership.to_bytes(), identity, NOW) == membership
    assert verify(membership.certificate, key.public, NOW).peer == peer_id(identity.public)


# ── what is stored ──────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_stored_comes_back() -> None:
    again = Identity.from_bytes(ANN.to_bytes())
    assert (again.peer, again.curve_secret, again.curve_public) == (
        ANN.peer,
        ANN.curve_secret,
        ANN.curve_public,
    )
    assert again.sign(b"x") == ANN.sign(b"x")
    assert MeshKey.from_bytes(MESH.to_bytes()).mesh == MESH.mesh
    membership = join(TOKEN, BOB, "Bob", NOW)
    assert Membership.from_bytes(membership.to_bytes(), BOB, NOW) == membership


def test_a_torn_or_mixed_up_file_is_told_and_never_half_believed() -> None:
    membership = join(TOKEN, BOB, "Bob", NOW).to_bytes()
    files = (ANN.to_bytes(), MESH.to_bytes(), membership)
    readers = (Identity.from_bytes, MeshKey.from_bytes, lambda data: Membership.from_bytes(data, BOB, NOW))
    for index, read in enumerate(readers):
        whole = files[index]
        torn = [whole[:length] for length in range(len(whole))]
        flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
        others = [file for other, file in enumerate(files) if other != index]
        for data in (*torn, *flipped, *others, whole + b"\n", bytes(len(whole))):
            with pytest.raises(TokenError, match="damaged"):
                read(data)


def test_the_membership_of_another_identity_is_refused() -> None:
    """Somebody copied one home's files into another."""
    membership = join(TOKEN, BOB, "Bob", NOW).to_bytes()
    with pytest.raises(TokenError, match="another identity"):
        Membership.from_bytes(membership, ANN, NOW)


# ── secrets ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_repr_text_or_traceback_shows_a_secret() -> None:
    token = read_token(TOKEN)
    secrets = [bytes(range(32)), bytes(range(32, 64)), bytes([7]) * 32, INVITE]
    shown = [f"{thing!r} {thing}" for thing in (ANN, MESH, MESH.signing, token, token.key, token.addresses)]
    try:
        read_token(TOKEN[:-1])
    except TokenError as error:
        shown.append("".join(traceback.TracebackException.from_exception(error).format()))
    for text in shown:
        assert TOKEN[20:60] not in text
        for secret in secrets:
            assert secret.hex()[:16] not in text
            assert repr(secret)[2:18] not in text


def test_the_same_seed_is_the_same_identity_and_another_is_another() -> None:
    """Pinned, so that an update never makes a PC a stranger to its mesh."""
    assert ANN.peer == "56475aa75463474c0285df5dbf2bcab7"
    assert MESH.mesh == "fe812c12f3ab4ce6ac5db69ac352f906"
    certificate = join(TOKEN, BOB, "Bob", NOW).certificate
    assert hashlib.sha256(TOKEN.encode()).hexdigest()[:16] == "d4226223f1fe4a8b"
    assert hashlib.sha256(certificate).hexdigest()[:16] == "af82f6376bfe7cbc"
    assert ANN.peer != BOB.peer
    for length in (0, 63, 65):
        with pytest.raises(ValueError):
            Identity.from_seed(bytes(length))
    with pytest.raises(ValueError):
        MeshKey.from_seed(bytes(31))
