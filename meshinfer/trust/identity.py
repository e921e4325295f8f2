"""An agent's two key pairs, and the names that are hashes of public keys.

Ed25519 signs adverts and certificates; X25519 is the CURVE key of the encrypted sockets (libzmq's CURVE
keys are raw X25519). They are separate keys, tied together by the certificate: neither is used in two
schemes.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshinfer.errors import TokenError
from meshinfer.values import MeshId, PeerId

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

ADVERT: Final = b"meshinfer advert 1"
"""Purposes: what a signature is for is signed with it, so that none can be passed off as another kind."""

_IDENTITY_FILE: Final = b"meshinfer identity 1\n"
_CHECK_BYTES: Final = 8


def peer_id(public: bytes) -> PeerId:
    """The name of the peer with this Ed25519 public key (32 bytes)."""
    return PeerId(hashlib.sha256(public).hexdigest()[:32])


def mesh_id(public: bytes) -> MeshId:
    """The name of the mesh with this Ed25519 public key (32 bytes)."""
    return MeshId(hashlib.sha256(public).hexdigest()[:32])


def signed_bytes(purpose: bytes, payload: bytes) -> bytes:
    """What is signed: the purpose, its end marked by a zero byte, then the payload."""
    return purpose + b"\0" + payload


def signature_holds(public: bytes, purpose: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether `signature` is the one of `public` over `payload`; False for what is no key or signature."""
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed_bytes(purpose, payload))
    except (InvalidSignature, ValueError):
        return False
    return True


class SigningKey:
    """An Ed25519 key from 32 secret bytes. Compares by identity and never shows its secret."""

    __slots__ = ("_key", "_seed", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise ValueError("a signing key is made from 32 random bytes")
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def sign(self, purpose: bytes, payload: bytes) -> bytes:
        return self._key.sign(signed_bytes(purpose, payload))

    def secret_bytes(self) -> bytes:
        """The seed: for storage with owner-only permissions, and for tokens; for no log."""
        return self._seed

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()[:16]}…)"


class Identity:
    """Who this agent is. Compares by identity and never shows its secrets."""

    __slots__ = ("_signing", "curve_public", "curve_secret", "peer", "public")

    def __init__(self, signing: SigningKey, curve_secret: bytes) -> None:
        self._signing = signing
        self.public: bytes = signing.public
        self.peer: PeerId = peer_id(signing.public)
        self.curve_secret: bytes = curve_secret
        curve = X25519PrivateKey.from_private_bytes(curve_secret)
        self.curve_public: bytes = curve.public_key().public_bytes_raw()

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of 64 random bytes; the same bytes give the same identity."""
        if len(seed) != 2 * KEY_BYTES:
            raise ValueError("an identity is made from 64 random bytes")
        return cls(SigningKey(seed[:KEY_BYTES]), seed[KEY_BYTES:])

    def sign(self, payload: bytes, purpose: bytes = ADVERT) -> bytes:
        """64 bytes that `signature_holds` and `Roster.verify_signature` accept for the same purpose."""
        return self._signing.sign(purpose, payload)

    def to_bytes(self) -> bytes:
        """For a file that only its owner may read. Carries a check, so that a torn write is noticed."""
        return sealed(_IDENTITY_FILE, self._signing.secret_bytes() + self.curve_secret)

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Raises TokenError for anything but what `to_bytes` gave."""
        seed = unsealed(_IDENTITY_FILE, data, "identity")
        if len(seed) != 2 * KEY_BYTES:
            raise TokenError(
                "the stored identity is damaged: restore it from a backup, or delete it and join again"
            )
        return cls.from_seed(seed)

    def __repr__(self) -> str:
        return f"Identity(peer={self.peer})"


def sealed(kind: bytes, content: bytes) -> bytes:
    """`content` for a file: what it is, the content, and a check against torn writes and mixed-up files."""
    return kind + content + _check(kind + content)


def unsealed(kind: bytes, data: bytes, name: str) -> bytes:
    """The content that `sealed` was given. Raises TokenError for a damaged file, or one of another kind."""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if not body.startswith(kind) or _check(body) != check:
        raise TokenError(
            f"the stored {name} is damaged, or of another version: restore it from a backup, "
            "or delete it and join the mesh again"
        )
    return body[len(kind) :]


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECK_BYTES]
