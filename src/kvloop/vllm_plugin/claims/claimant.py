"""The claimant's side: for each request, who was asked, who answered, what is being read. Pure.

Runs on the scheduler's thread; messages go out through ``send`` and come in through
:meth:`Claimant.received`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from kvloop.vllm_plugin.claims.messages import (
    PROTOCOL_VERSION,
    Claim,
    ClaimId,
    Done,
    Grant,
    Message,
    Refuse,
    Renew,
    Terms,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Address: TypeAlias = tuple[str, int]
"""Host and claim port of a holder."""

_RENEWALS_PER_LEASE: Final = 3


@dataclass(slots=True)
class _Asked:
    """One holder that was asked for one request."""

    request_id: str
    address: Address
    asked_s: float
    grant: Grant | None = None
    renew_s: float = 0.0


@dataclass(slots=True)
class _Ask:
    """One request's question."""

    first: int
    deadline_s: float
    claim_ids: list[ClaimId]
    waiting: set[ClaimId]
    best: ClaimId | None = None
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Granted:
    """What may be read for a request."""

    grant: Grant
    first: int
    """Index of the first granted block, counted from the prompt's beginning."""
    claim_s: float
    """From the question to the answer."""

    @property
    def end(self) -> int:
        """Index after the last granted block."""
        return self.first + min(map(len, self.grant.block_ids))


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing to read, and each holder's reason."""

    reasons: tuple[str, ...]


class Claimant:
    """All of one engine's questions."""

    def __init__(
        self,
        engine_id: str,
        terms: Terms,
        send: Callable[[Address, Message], None],
        *,
        deadline_s: float = 0.5,
        lease_s: float = 5.0,
    ) -> None:
        """``deadline_s``: how long a request waits for answers before it is computed."""
        self._engine_id = engine_id
        self._terms = terms
        self._send = send
        self._deadline_s = deadline_s
        self._lease_ms = int(lease_s * 1000)
        self._asks: dict[str, _Ask] = {}
        self._asked: dict[ClaimId, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def ask(
        self,
        request_id: str,
        holders: Sequence[Address],
        first: int,
        hashes: list[bytes],
        now_s: float,
    ) -> None:
        """Ask all ``holders`` for the blocks from ``first`` on."""
        ask = _Ask(first, now_s + self._deadline_s, [], set())
        for address in holders:
            claim_id = secrets.token_bytes(16)
            ask.claim_ids.append(claim_id)
            ask.waiting.add(claim_id)
            self._asked[claim_id] = _Asked(request_id, address, now_s)
            claim = Claim(
                PROTOCOL_VERSION,
                claim_id,
                self._engine_id,
                self._terms,
                first,
                hashes,
                self._lease_ms,
            )
            self._send(address, claim)
        self._asks[request_id] = ask

    def received(self, address: Address, message: Message, now_s: float) -> None:
        """A holder's answer. One that nobody waits for any more is given back."""
        if not isinstance(message, Grant | Refuse):
            return
        asked = self._asked.get(message.claim_id)
        if asked is None or asked.address != address:
            if isinstance(message, Grant):
                self._send(address, Done(message.claim_id))
            return
        if asked.grant is not None:
            return  # the same grant once more
        ask = self._asks[asked.request_id]
        ask.waiting.discard(message.claim_id)
        if isinstance(message, Refuse):
            ask.refusals.append(message.reason)
            del self._asked[message.claim_id]
            return
        asked.grant = message
        asked.renew_s = now_s + message.lease_ms / 1000 / _RENEWALS_PER_LEASE
        self._keep_best(ask, message.claim_id)

    def outcome(self, request_id: str, now_s: float) -> Granted | Refused | None:
        """What became of a request's question; None while it is worth waiting."""
        ask = self._asks.get(request_id)
        if ask is None:
            return Refused(("not_asked",))
        if ask.waiting and now_s < ask.deadline_s:
            return None
        for claim_id in ask.waiting:
            self._give_back(claim_id)
            ask.refusals.append("timeout")
        ask.waiting.clear()
        if ask.best is None:
            del self._asks[request_id]
            return Refused(tuple(ask.refusals))
        asked = self._asked[ask.best]
        assert asked.grant is not None  # noqa: S101 - what `best` means
        return Granted(asked.grant, ask.first, now_s - asked.asked_s)

    def over(self, request_id: str) -> None:
        """The request has read what was granted, or will not any more."""
        ask = self._asks.pop(request_id, None)
        if ask is None:
            return
        for claim_id in ask.claim_ids:
            if claim_id in self._asked:
                self._give_back(claim_id)

    def renew(self, now_s: float) -> None:
        """Tell holders that leases are still in use, when it is time to."""
        due: dict[Address, list[ClaimId]] = {}
        for claim_id, asked in self._asked.items():
            if asked.grant is not None and asked.renew_s <= now_s:
                due.setdefault(asked.address, []).append(claim_id)
                asked.renew_s = now_s + asked.grant.lease_ms / 1000 / _RENEWALS_PER_LEASE
        for address, claim_ids in due.items():
            self._send(address, Renew(claim_ids, self._lease_ms))

    def _keep_best(self, ask: _Ask, claim_id: ClaimId) -> None:
        """Keep the longest grant, the first one asked among equals; give the other back."""
        if ask.best is None:
            ask.best = claim_id
            return
        new, best = self._length(claim_id), self._length(ask.best)
        is_preferred = ask.claim_ids.index(claim_id) < ask.claim_ids.index(ask.best)
        if new > best or (new == best and is_preferred):
            claim_id, ask.best = ask.best, claim_id
        self._give_back(claim_id)

    def _length(self, claim_id: ClaimId) -> int:
        grant = self._asked[claim_id].grant
        return min(map(len, grant.block_ids), default=0) if grant is not None else 0

    def _give_back(self, claim_id: ClaimId) -> None:
        self._send(self._asked.pop(claim_id).address, Done(claim_id))
