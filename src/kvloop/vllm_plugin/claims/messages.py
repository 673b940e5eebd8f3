"""Messages of the claim protocol and their encoding.

A message is a MessagePack array that begins with its type's tag, and a seal over it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, TypeAlias

import msgspec

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Half a million block hashes; a longer message is not one of ours."""
_SEAL_BYTES: Final = 16

ClaimId: TypeAlias = bytes
"""16 random bytes, chosen by the claimant."""


class BadMessageError(Exception):
    """The bytes are not a message that we accept; the message says why."""


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What both sides must have in common for a block hash to mean the same to both."""

    hash_algorithm: str
    """vLLM's `prefix_caching_hash_algo`."""
    seed_fingerprint: bytes
    """Of the hash that every chain starts from."""
    block_size: int
    """Tokens in a block."""
    num_groups: int
    """KV cache groups."""
    compatibility: str
    """NIXL's compatibility hash: model, dtypes, attention backend, versions."""


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Which leading blocks of these do you hold?"""

    version: int
    claim_id: ClaimId
    claimant: str
    """Engine id of who asks."""
    terms: Terms
    first: int
    """Index of the first block asked for, counted from the prompt's beginning."""
    hashes: list[bytes]
    """Block hashes from ``first`` on."""
    lease_ms: int


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """These many, held for you until the lease ends."""

    claim_id: ClaimId
    engine_id: str
    host: str
    """Where NIXL's handshake listens."""
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    block_ids: list[list[int]]
    """For each KV cache group, in the order of the claim's hashes."""
    lease_ms: int


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """None, and why."""

    claim_id: ClaimId
    reason: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The claimant needs it no more."""

    claim_id: ClaimId


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The claimant is still reading."""

    claim_ids: list[ClaimId]
    lease_ms: int


Message: TypeAlias = Claim | Grant | Refuse | Done | Renew

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Wire:
    """Encodes and decodes under one shared secret (empty: messages are not sealed)."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32).digest() if secret else b""

    def encode(self, message: Message) -> list[bytes]:
        """The frames of a message."""
        body = _encoder.encode(message)
        return [body, self._seal(body)]

    def decode(self, frames: list[bytes]) -> Message:
        """The message in ``frames``. Raises BadMessageError."""
        if len(frames) != 2:
            raise BadMessageError(f"{len(frames)} frames instead of 2")
        body, seal = frames
        if len(body) > MAX_MESSAGE_BYTES:
            raise BadMessageError(f"{len(body)} bytes are too many")
        if not hmac.compare_digest(self._seal(body), seal):
            raise BadMessageError("the seal does not fit: another secret, or none")
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadMessageError(f"not a message of the claim protocol: {error}") from error

    def _seal(self, body: bytes) -> bytes:
        if not self._key:
            return b""
        return hashlib.blake2b(body, digest_size=_SEAL_BYTES, key=self._key).digest()


def seed_fingerprint(none_hash: bytes) -> bytes:
    """What may be told of the hash that chains start from: with a secret seed, not the hash."""
    return hashlib.blake2b(none_hash, digest_size=16, person=b"kvloop-claims").digest()


def disagreement(ours: Terms, theirs: Terms) -> str | None:
    """The first of the terms on which two engines differ, as a reason; None if they agree."""
    for name, reason in _REASONS.items():
        if getattr(ours, name) != getattr(theirs, name):
            return reason
    return None


_REASONS: Final = {
    "hash_algorithm": "hash_algorithm",
    "seed_fingerprint": "hash_seed",
    "block_size": "block_size",
    "num_groups": "groups",
    "compatibility": "layout",
}
