"""Fingerprints of token prefixes: what the ledger keeps instead of the tokens.

A fingerprint stands for *all* tokens up to its position, so two sequences are equal up to the last
position at which their fingerprints are equal. There is one per :data:`UNIT_TOKENS` tokens: half a
byte per token.

The hash is the multilinear family of Lemire and Kaser, "Strongly universal string hashing is
fast" (Comput. J. 57, 2014): with secret random 64-bit keys ``k`` and 32-bit characters ``s``, the
upper half of ``k0 + sum(k[i+1] * s[i]) mod 2**64`` is strongly universal, so two given different
sequences of one length collide with probability 2**-32. Two independent hashes make it 2**-64.
The keys never leave the process, and nobody learns more than whether a prompt matched, so prompts
cannot be made to collide.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT_TOKENS: Final = 16
"""Tokens between two fingerprints. Block sizes of vLLM that kvloop can use are multiples of it."""

Prefixes: TypeAlias = NDArray[np.uint64]
"""Shape ``[num_tokens // UNIT_TOKENS]``; entry ``i`` covers the first ``(i + 1) * UNIT_TOKENS``."""

_INITIAL_KEYS: Final = 8192
_UPPER_HALF: Final = np.uint64(0xFFFFFFFF00000000)
_HALF_BITS: Final = np.uint64(32)


MAX_TOKEN_ID: Final = 2**32 - 1
"""Larger ids are no characters of the hash."""


def are_token_ids(value: object) -> bool:
    """Whether this is a list of numbers that can be fingerprinted as tokens."""
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value
    )


class Fingerprinter:
    """Computes prefix fingerprints under one secret.

    Fingerprints of two instances can be compared only if their secrets are equal (replicas that
    share a ledger share the secret).
    """

    def __init__(self, secret: bytes) -> None:
        """``secret``: at least 16 bytes that no client can know."""
        if len(secret) < 16:
            raise ValueError(f"a fingerprint secret needs at least 16 bytes, got {len(secret)}")
        self._secret = secret
        self._keys = self._expand(_INITIAL_KEYS)

    def prefixes(self, token_ids: Sequence[int]) -> Prefixes:
        """Fingerprint every whole unit of ``token_ids`` (ids in ``0 .. 2**32``).

        Raises OverflowError when an id is negative or does not fit 32 bits.
        """
        num_units = len(token_ids) // UNIT_TOKENS
        num_tokens = num_units * UNIT_TOKENS
        keys = self._keys_for(num_tokens)
        # array() reads a list several times faster than numpy does.
        packed = array("I", token_ids if num_tokens == len(token_ids) else token_ids[:num_tokens])
        tokens = np.frombuffer(packed, dtype=np.uint32).astype(np.uint64)
        sums = np.empty((2, num_units), dtype=np.uint64)
        for row in range(2):
            products = tokens * keys[row, 1 : num_tokens + 1]
            per_unit = products.reshape(num_units, UNIT_TOKENS).sum(axis=1, dtype=np.uint64)
            sums[row] = np.cumsum(per_unit, dtype=np.uint64) + keys[row, 0]
        prefixes: Prefixes = (sums[0] & _UPPER_HALF) | (sums[1] >> _HALF_BITS)
        return prefixes

    def _keys_for(self, num_tokens: int) -> NDArray[np.uint64]:
        """Keys for that many tokens, shape ``[2, more than num_tokens]``."""
        available = self._keys.shape[1]
        if num_tokens >= available:
            while available <= num_tokens:
                available *= 2
            self._keys = self._expand(available)
        return self._keys

    def _expand(self, num_keys: int) -> NDArray[np.uint64]:
        # One stream per hash: each is a prefix of its own longer expansion, so growing the keys
        # leaves earlier fingerprints valid.
        streams = [
            hashlib.shake_256(self._secret + bytes([row])).digest(num_keys * 8) for row in range(2)
        ]
        return np.stack(
            [np.frombuffer(stream, dtype="<u8").astype(np.uint64) for stream in streams]
        )


def common_tokens(ours: Prefixes, theirs: Prefixes) -> int:
    """Tokens that both sequences provably start with: a multiple of :data:`UNIT_TOKENS`."""
    num_units = min(len(ours), len(theirs))
    if num_units == 0:
        return 0
    # The usual turn continues the whole history: one comparison instead of all.
    if ours[num_units - 1] == theirs[num_units - 1]:
        return num_units * UNIT_TOKENS
    differs = ours[:num_units] != theirs[:num_units]
    return int(differs.argmax()) * UNIT_TOKENS
