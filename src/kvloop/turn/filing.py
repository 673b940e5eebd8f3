"""After the answer: D's new reference goes into the ledger, or its blocks are given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvloop.ledger.pins import PinState
from kvloop.ledger.reference import KVReference
from kvloop.ledger.retention import tokens_over
from kvloop.proof.fingerprint import are_token_ids
from kvloop.proof.trim import unusable_reason
from kvloop.turn.accounting import account_pin
from kvloop.turn.answer_stream import NOTHING_SAID
from kvloop.turn.releasing import release, release_claimed
from kvloop.wire import REMOTE_NUM_TOKENS

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvloop.engines.facts import EngineLoad
    from kvloop.engines.fleet import Engine
    from kvloop.turn.answer_stream import AnswerEnd
    from kvloop.turn.plan import ProvenPrompt
    from kvloop.turn.request import TurnRequest
    from kvloop.turn.services import Services


def file_reference(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    decode: Engine,
    end: AnswerEnd,
    supersedes: Collection[int],
    services: Services,
) -> str:
    """File what D retained; returns what became of it, for the receipt."""
    outcome = _file(request, prompt, decode, end, supersedes, services)
    services.metrics.references.labels(outcome=outcome).inc()
    return outcome


def _file(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    decode: Engine,
    end: AnswerEnd,
    supersedes: Collection[int],
    services: Services,
) -> str:
    params = end.params
    if decode.facts is not None and decode.facts.claims:
        return _file_home(request, prompt, decode, supersedes, services)
    if end is NOTHING_SAID:
        return "not_told"
    if params is None:
        return "none_given"
    pin = account_pin(params, decode, services)
    block_size = decode.facts.block_size if decode.facts is not None else 0
    unusable = unusable_reason(params, block_size) or _unwanted(request, prompt)
    if unusable is None and pin.num_tokens > _budget_tokens(decode, services):
        unusable = "over_budget"
    if unusable is not None or prompt is None:
        release(pin.pin_id, decode.url, params, services)
        return f"released_{unusable}"
    generated = end.token_ids if are_token_ids(end.token_ids) else None
    retained = [*prompt.ids.ids, *(generated or ())][: params[REMOTE_NUM_TOKENS]]
    reference = KVReference(
        reference_id=pin.pin_id,
        decode=decode.url,
        engine_id=pin.engine_id,
        params=msgspec.json.encode(params),
        num_tokens=params[REMOTE_NUM_TOKENS],
        block_size=block_size,
        prefixes=services.fingerprinter.prefixes(retained),
        deadline_s=pin.deadline_s,
        boundaries=tuple(prompt.boundaries),
        conversation=request.conversation,
        continued=bool(supersedes),
    )
    release_claimed(services.ledger.file(reference, supersedes), "superseded", services)
    relieve(decode, services)
    return "filed" if generated is not None else "filed_prompt_only"


def _file_home(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    decode: Engine,
    supersedes: Collection[int],
    services: Services,
) -> str:
    """This D can be asked for what it holds: all that is kept is that the conversation is there."""
    if prompt is None:
        return request.without_reuse or "tokens_unknown"
    if request.is_last or not prompt.boundaries:
        return "conversation_ended" if request.is_last else "no_boundary"
    fallen = services.ledger.file_home(
        decode.url, tuple(prompt.boundaries), request.conversation, supersedes
    )
    release_claimed(fallen, "superseded", services)
    return "home"


def _unwanted(request: TurnRequest, prompt: ProvenPrompt | None) -> str | None:
    """Why a reference that D could give back is not kept."""
    if request.is_last:
        return "conversation_ended"
    if prompt is None:
        return request.without_reuse or "tokens_unknown"
    return None


def _budget_tokens(decode: Engine, services: Services) -> int:
    capacity = decode.facts.kv_capacity_tokens if decode.facts is not None else 0
    return int(capacity * services.pin_budget)


def relieve(decode: Engine, services: Services, load: EngineLoad | None = None) -> None:
    """Have D free what it pins for us beyond its budget, or while requests wait for memory.

    ``load``: D's, if it was looked at just now.
    """
    services.pins.expire(services.clock())
    if decode.facts is None:
        return
    pinned = services.pins.tokens(decode.url, PinState.HELD, PinState.CLAIMED, PinState.STUCK)
    over = tokens_over(
        capacity=decode.facts.kv_capacity_tokens,
        budget_share=services.pin_budget,
        pinned=pinned,
        usage=load.kv_usage if load is not None else 0.0,
        waiting=load.waiting if load is not None else 0,
        longest=decode.facts.longest_tokens,
    )
    if over:
        release_claimed(services.ledger.evict(decode.url, over), "evicted", services)
