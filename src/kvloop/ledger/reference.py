"""KV references: what a decode node retains after a turn, in the two states they can be in.

A :class:`KVReference` lies in the ledger. Claiming it takes it out and makes a
:class:`ClaimedReference`, the only type that can be attached to a prompt or released; so a
reference that was used cannot be used again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from kvloop.proof.chain import ChainKey
    from kvloop.proof.fingerprint import Prefixes


_RANK: Final = re.compile(r"_dp\d+$")


def same_life(engine_id: str, other: str) -> bool:
    """Whether two engine ids are of one start of one engine.

    vLLM makes a new id at each start; data-parallel ranks add their number to it.
    """
    return engine_id == other or _RANK.sub("", engine_id) == _RANK.sub("", other)


@dataclass(frozen=True, slots=True, eq=False)
class KVReference:
    """What D said it retains, what is proven of it, and until when we may say so."""

    reference_id: int
    decode: str
    """Name of the decode node (its URL)."""
    engine_id: str
    """The engine's own id: another one at the same URL holds none of this."""
    params: bytes
    """D's ``kv_transfer_params``, as JSON: kept whole, with fields that we do not know."""
    num_tokens: int
    """Tokens whose KV D retains."""
    block_size: int
    """Tokens in a block of D's."""
    prefixes: Prefixes
    """Fingerprints of the tokens that we know to be behind the reference."""
    deadline_s: float
    """On the router's clock; afterwards D may have freed the blocks."""
    boundaries: tuple[ChainKey, ...]
    conversation: str | None = None
    continued: bool = False
    """Whether it follows an earlier reference of its conversation."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes in the ledger, about (`bench/ledger.py` measures it)."""
        return (
            _ENTRY_BYTES
            + self.prefixes.nbytes
            + len(self.params)
            + _BOUNDARY_BYTES * len(self.boundaries)
        )


_ENTRY_BYTES: Final = 1000
_BOUNDARY_BYTES: Final = 160


@dataclass(frozen=True, slots=True, eq=False)
class ClaimedReference:
    """A reference taken out of the ledger for one use."""

    reference: KVReference

    @property
    def reference_id(self) -> int:
        """Its name in the ledger and among the pins."""
        return self.reference.reference_id

    @property
    def params(self) -> dict[str, Any]:
        """D's ``kv_transfer_params`` as they came."""
        return msgspec.json.decode(self.reference.params, type=dict[str, Any])
