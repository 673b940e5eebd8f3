"""The holder's leases: which blocks are held for whom, and until when. Pure.

The pool is vLLM's ``BlockPool``, or anything that counts references; all of this runs on the
thread that owns it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvloop.vllm_plugin.claims.messages import ClaimId

LONGEST_LEASE_S: Final = 30.0

Block = TypeVar("Block")


class Pool(Protocol[Block]):
    """What leases need of a block pool."""

    def find(self, block_hash: bytes) -> Sequence[Block] | None:
        """The cached block of every KV cache group, or None unless all groups have it."""

    def hold(self, blocks: Sequence[Block]) -> None:
        """Keep them from being evicted, once more."""

    def let_go(self, blocks: Sequence[Block]) -> None:
        """Undo one :meth:`hold`."""


@dataclass(slots=True)
class Lease(Generic[Block]):
    """Blocks held for one claim."""

    claim_id: ClaimId
    holder_of: Hashable
    """Who may renew it and let it go: the claimant's address."""
    columns: list[Sequence[Block]]
    """For each granted block, the block of every KV cache group."""
    length_s: float
    ends_s: float


@dataclass(slots=True)
class Leases(Generic[Block]):
    """All leases of one holder."""

    pool: Pool[Block]
    max_blocks: int
    """No claim is granted beyond so many leased blocks."""
    _leases: dict[ClaimId, Lease[Block]] = field(default_factory=dict)
    _ends: list[tuple[float, ClaimId]] = field(default_factory=list)
    leased_blocks: int = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, claim_id: ClaimId) -> bool:
        return claim_id in self._leases

    def claim(
        self,
        claim_id: ClaimId,
        address: Hashable,
        hashes: Sequence[bytes],
        wish_s: float,
        now_s: float,
    ) -> Lease[Block] | str:
        """Hold the leading blocks of ``hashes`` that are there; or the reason for a refusal.

        A claim that comes twice finds its lease.
        """
        known = self._leases.get(claim_id)
        if known is not None:
            return known if known.holder_of == address else "claim_id"
        columns = []
        for block_hash in hashes:
            column = self.pool.find(block_hash)
            if column is None:
                break
            columns.append(column)
        if not columns:
            return "miss"
        room = self.max_blocks - self.leased_blocks
        del columns[max(0, room) :]
        if not columns:
            return "busy"
        for column in columns:
            self.pool.hold(column)
        length_s = min(wish_s, LONGEST_LEASE_S)
        lease = Lease(claim_id, address, columns, length_s, now_s + length_s)
        self._leases[claim_id] = lease
        self.leased_blocks += len(columns)
        heapq.heappush(self._ends, (lease.ends_s, claim_id))
        return lease

    def renew(self, claim_id: ClaimId, address: Hashable, wish_s: float, now_s: float) -> bool:
        """Let a lease go on; False if there is none (any more)."""
        lease = self._leases.get(claim_id)
        if lease is None or lease.holder_of != address:
            return False
        lease.ends_s = max(lease.ends_s, now_s + min(wish_s, LONGEST_LEASE_S))
        return True

    def done(self, claim_id: ClaimId, address: Hashable) -> bool:
        """Let go of a lease's blocks; False if there is none (any more)."""
        lease = self._leases.get(claim_id)
        if lease is None or lease.holder_of != address:
            return False
        self._end(lease)
        return True

    def expire(self, now_s: float) -> int:
        """End leases whose time is over; how many."""
        ended = 0
        while self._ends and self._ends[0][0] <= now_s:
            _, claim_id = heapq.heappop(self._ends)
            lease = self._leases.get(claim_id)
            if lease is None:
                continue
            if lease.ends_s > now_s:  # it was renewed
                heapq.heappush(self._ends, (lease.ends_s, claim_id))
            else:
                self._end(lease)
                ended += 1
        return ended

    def next_end_s(self) -> float | None:
        """When there may be something to expire; None if nothing is leased."""
        return self._ends[0][0] if self._leases else None

    def _end(self, lease: Lease[Block]) -> None:
        del self._leases[lease.claim_id]
        self.leased_blocks -= len(lease.columns)
        # The tail first, as vLLM frees a request: what comes last is evicted first.
        for column in reversed(lease.columns):
            self.pool.let_go(column)
