"""The holder's side: claims answered between two steps of the engine's loop, on its thread. Pure.

A block in the prefix cache may belong to a step that is still in flight (docs/claims.md), so a
grant waits until every step that was in flight at its claim has been completed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvloop.vllm_plugin.claims.messages import (
    PROTOCOL_VERSION,
    Claim,
    Done,
    Grant,
    Message,
    Refuse,
    Renew,
    Terms,
    disagreement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

    from kvloop.vllm_plugin.claims.leases import Lease, Leases

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where NIXL finds this engine."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int


@dataclass(slots=True)
class HolderCounts:
    """What the holder did, for metrics."""

    claims: int = 0
    grants: int = 0
    granted_blocks: int = 0
    expired: int = 0
    refusals: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Unconfirmed(Generic[Block]):
    """A lease whose blocks may not have been written yet."""

    peer: bytes
    lease: Lease[Block]
    in_flight: list[Hashable]


class Holder(Generic[Block]):
    """Answers claims for one engine."""

    def __init__(
        self,
        terms: Terms,
        where: Whereabouts,
        leases: Leases[Block],
        block_id: Callable[[Block], int],
        reply: Callable[[bytes, Message], None],
        refuses_all: str | None = None,
    ) -> None:
        """``refuses_all``: the reason why this engine can grant nothing, if so."""
        self._terms = terms
        self._where = where
        self._leases = leases
        self._block_id = block_id
        self._reply = reply
        self._refuses_all = refuses_all
        self._unconfirmed: list[_Unconfirmed[Block]] = []
        self.counts = HolderCounts()

    def take_counts(self) -> HolderCounts:
        """What was counted since the last call."""
        taken, self.counts = self.counts, HolderCounts()
        return taken

    @property
    def waits_for_steps(self) -> bool:
        """Whether grants wait for steps in flight: :meth:`confirm` must be called again soon."""
        return bool(self._unconfirmed)

    @property
    def next_end_s(self) -> float | None:
        """When :meth:`expire` should be called next; None if nothing is leased."""
        return self._leases.next_end_s()

    def received(
        self, peer: bytes, message: Message, in_flight: Collection[Hashable], now_s: float
    ) -> None:
        """Work on a claimant's message; ``in_flight``: the steps that are not completed yet."""
        match message:
            case Claim():
                self._claimed(peer, message, in_flight, now_s)
            case Done():
                self._unconfirmed = [
                    one for one in self._unconfirmed if one.lease.claim_id != message.claim_id
                ]
                self._leases.done(message.claim_id, peer)
            case Renew():
                for claim_id in message.claim_ids:
                    self._leases.renew(claim_id, peer, message.lease_ms / 1000, now_s)
            case _:  # answers do not come this way
                return

    def confirm(self, in_flight: Collection[Hashable]) -> None:
        """Send the grants whose steps have been completed."""
        waiting = []
        for one in self._unconfirmed:
            one.in_flight = [step for step in one.in_flight if step in in_flight]
            if one.in_flight:
                waiting.append(one)
            elif one.lease.claim_id in self._leases:
                self._grant(one.peer, one.lease)
        self._unconfirmed = waiting

    def expire(self, now_s: float) -> None:
        """End leases whose claimants have not renewed them."""
        self.counts.expired += self._leases.expire(now_s)

    def _claimed(
        self, peer: bytes, claim: Claim, in_flight: Collection[Hashable], now_s: float
    ) -> None:
        self.counts.claims += 1
        reason = self._objection(claim)
        if reason is not None:
            self._refuse(peer, claim, reason)
            return
        lease = self._leases.claim(claim.claim_id, peer, claim.hashes, claim.lease_ms / 1000, now_s)
        if isinstance(lease, str):
            self._refuse(peer, claim, lease)
        elif in_flight:
            self._unconfirmed.append(_Unconfirmed(peer, lease, list(in_flight)))
        else:
            self._grant(peer, lease)

    def _objection(self, claim: Claim) -> str | None:
        if self._refuses_all is not None:
            return self._refuses_all
        if claim.version != PROTOCOL_VERSION:
            return "version"
        return disagreement(self._terms, claim.terms)

    def _refuse(self, peer: bytes, claim: Claim, reason: str) -> None:
        self.counts.refusals[reason] = self.counts.refusals.get(reason, 0) + 1
        self._reply(peer, Refuse(claim.claim_id, reason))

    def _grant(self, peer: bytes, lease: Lease[Block]) -> None:
        self.counts.grants += 1
        self.counts.granted_blocks += len(lease.columns)
        where = self._where
        groups = [
            [self._block_id(block) for block in group] for group in zip(*lease.columns, strict=True)
        ]
        self._reply(
            peer,
            Grant(
                lease.claim_id,
                where.engine_id,
                where.host,
                where.port,
                where.tp_size,
                where.dcp_size,
                where.pp_size,
                groups,
                int(lease.length_s * 1000),
            ),
        )
