"""Find, prove, decide: from a prompt's tokens to a route with its claimed reference.

No I/O. A claim made here is never given back: whatever becomes of the turn, nobody else can use
the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvloop.ledger.memory import NOTHING_FOUND, Found
from kvloop.policy.route import (
    Claim,
    DecodeNode,
    Policy,
    PrefillNode,
    Pull,
    Pullable,
    Recompute,
    Route,
    TurnView,
)
from kvloop.proof.chain import ChainKey, message_chain, token_chain
from kvloop.proof.trim import reusable_tokens, trim
from kvloop.turn.request import Api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloop.engines.fleet import Engine
    from kvloop.engines.pairs import Pairs
    from kvloop.ledger.memory import Ledger
    from kvloop.ledger.reference import ClaimedReference
    from kvloop.proof.fingerprint import Prefixes
    from kvloop.turn.bodies import PromptIds
    from kvloop.turn.request import TurnRequest


@dataclass(frozen=True, slots=True)
class ProvenPrompt:
    """A prompt whose tokens we know, with what finds and proves it."""

    ids: PromptIds
    prefixes: Prefixes
    boundaries: list[ChainKey]

    def is_what_was_computed(self, prompt_tokens: int | None) -> bool:
        """Whether P's count agrees: an engine that ignored our ids has computed something else."""
        return prompt_tokens is None or prompt_tokens == len(self.ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """What this turn will do."""

    route: Route
    attach: dict[str, Any] | None = None
    """The claimed reference, trimmed to what is proven: goes to P, once."""
    claimed: ClaimedReference | None = None
    """The same as D gave it: its deadline, and its release should P refuse."""
    holders: tuple[tuple[str, int], ...] = ()
    """Claim addresses of the decode nodes that P is to ask."""
    supersedes: tuple[int, ...] = ()
    """Ledger entries that this turn's own entry will replace."""

    @property
    def source(self) -> str:
        """Decode node that P reads from, or asks first. Raises ValueError if it reads nothing."""
        if self.claimed is not None:
            return self.claimed.reference.decode
        if isinstance(self.route, Claim):
            return self.route.holders[0]
        raise ValueError(f"a {self.route.kind} reads nothing")


def boundaries_of(request: TurnRequest, prefixes: Prefixes) -> list[ChainKey]:
    """The keys under which this turn is found and filed, shortest first."""
    if request.api is Api.CHAT:
        return message_chain(request.identity, request.messages)
    return token_chain(request.identity, prefixes)


def make_plan(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    *,
    turn_number: int,
    prefills: Sequence[Engine],
    decodes: Sequence[Engine],
    ledger: Ledger,
    pairs: Pairs,
    policy: Policy,
    now_s: float,
) -> Plan:
    """Decide, and claim what the decision needs. Raises NoUsableNodeError."""
    found = NOTHING_FOUND
    if prompt is not None:
        found = ledger.find(prompt.boundaries, prompt.prefixes, now_s, request.conversation)
    usable_decodes = {engine.url for engine in decodes}
    view = TurnView(
        turn_number=turn_number,
        prompt_tokens=len(prompt.ids) if prompt is not None else None,
        prefills=tuple(_prefill_node(engine, prompt, pairs, now_s) for engine in prefills),
        decodes=tuple(_decode_node(engine) for engine in decodes),
        pullables=_pullables(found, prompt, usable_decodes),
        home=found.home,
        may_claim=request.reuse,
        without_prefill=request.without_prefill,
    )
    route = policy.decide(view)
    if isinstance(route, Pull):
        return _claim(route, found, ledger, now_s)
    if isinstance(route, Claim):
        holders = _addresses(route.holders, decodes)
        return Plan(route, holders=holders, supersedes=_continued(found))
    return Plan(route, supersedes=_continued(found))


def _prefill_node(
    engine: Engine, prompt: ProvenPrompt | None, pairs: Pairs, now_s: float
) -> PrefillNode:
    return PrefillNode(
        name=engine.url,
        held_tokens=engine.residency.held_tokens(prompt.prefixes) if prompt is not None else 0,
        can_pull=engine.facts is not None and engine.facts.can_pull,
        barred=pairs.barred(engine.url, now_s),
        claims=engine.facts is not None and engine.facts.claims,
    )


def _decode_node(engine: Engine) -> DecodeNode:
    grants = engine.facts is not None and bool(engine.facts.claim_addresses)
    return DecodeNode(engine.url, grants)


def _addresses(names: Sequence[str], decodes: Sequence[Engine]) -> tuple[tuple[str, int], ...]:
    """Claim addresses of these decode nodes, in their order."""
    by_name = {engine.url: engine for engine in decodes}
    return tuple(
        address
        for name in names
        if (facts := by_name[name].facts) is not None
        for address in facts.claim_addresses
    )


def _pullables(
    found: Found, prompt: ProvenPrompt | None, usable_decodes: set[str]
) -> tuple[Pullable, ...]:
    if prompt is None:
        return ()
    pullables = []
    for candidate in found.candidates:
        reference = candidate.reference
        num_tokens = reusable_tokens(
            candidate.common_tokens, reference.num_tokens, len(prompt.ids), reference.block_size
        )
        if num_tokens > 0 and reference.decode in usable_decodes:
            pullables.append(Pullable(reference.reference_id, reference.decode, num_tokens))
    return tuple(pullables)


def _claim(route: Pull, found: Found, ledger: Ledger, now_s: float) -> Plan:
    claimed = ledger.claim(route.reference_id, now_s)
    if claimed is None:
        return Plan(Recompute(route.prefill, route.decode, "reference_gone"))
    attach = trim(claimed.params, route.num_tokens, claimed.reference.block_size)
    supersedes = {route.reference_id, *_continued(found)}
    return Plan(route, attach=attach, claimed=claimed, supersedes=tuple(supersedes))


def _continued(found: Found) -> tuple[int, ...]:
    """References of which this prompt continues every token: the next one covers them.

    A reference of which it is only a branch stays: its own conversation may go on.
    """
    continued = [
        candidate.reference.reference_id for candidate in found.candidates if candidate.is_continued
    ]
    if found.continued_home is not None and not continued:
        continued.append(found.continued_home)
    return tuple(continued)
