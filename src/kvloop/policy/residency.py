"""What a prefill node likely holds in its own prefix cache: an estimate from what it was sent.

vLLM evicts the least recently used blocks first; so do we, at the same capacity. The estimate only
decides whether a pull is worth it: being wrong costs time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvloop.proof.fingerprint import UNIT_TOKENS

if TYPE_CHECKING:
    from kvloop.proof.fingerprint import Prefixes

_STRIDE_UNITS: Final = 4
STRIDE_TOKENS: Final = _STRIDE_UNITS * UNIT_TOKENS
"""Granularity of the estimate."""


class Residency:
    """Prompt prefixes that one node computed lately."""

    def __init__(self, capacity_tokens: int) -> None:
        """``capacity_tokens``: the node's KV cache; 0 if it has no prefix cache."""
        self._capacity = capacity_tokens // STRIDE_TOKENS
        self._held: OrderedDict[int, None] = OrderedDict()

    def held_tokens(self, prefixes: Prefixes) -> int:
        """Leading tokens of a prompt that the node likely holds."""
        held = 0
        for fingerprint in _strides(prefixes):
            if fingerprint not in self._held:
                break
            held += STRIDE_TOKENS
        return held

    def served(self, prefixes: Prefixes) -> None:
        """The node has just computed or loaded this prompt."""
        if self._capacity == 0:
            return
        # The tail first: vLLM frees a request's last blocks first, so they are evicted first.
        for fingerprint in reversed(_strides(prefixes)):
            self._held[fingerprint] = None
            self._held.move_to_end(fingerprint)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


def _strides(prefixes: Prefixes) -> list[int]:
    strides: list[int] = prefixes[_STRIDE_UNITS - 1 :: _STRIDE_UNITS].tolist()
    return strides
