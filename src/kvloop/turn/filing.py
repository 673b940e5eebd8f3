"""After the answer: D's new reference goes into the ledger, or its blocks are given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvloop.ledger.reference import ClaimedReference, KVReference
from kvloop.proof.trim import unusable_reason
from kvloop.turn.answer_stream import NOTHING_SAID
from kvloop.wire import REMOTE_ENGINE_ID, REMOTE_EXPIRY_TIME, REMOTE_NUM_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    supersedes: Iterable[int],
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
    supersedes: Iterable[int],
    services: Services,
) -> str:
    params = end.params
    if end is NOTHING_SAID:
        return "not_told"
    if params is None:
        return "none_given"
    block_size = decode.facts.block_size if decode.facts is not None else 0
    unusable = unusable_reason(params, block_size)
    if unusable is None and prompt is None:
        unusable = request.without_reuse or "tokens_unknown"
    if unusable is not None or prompt is None:
        release(params, services)
        return f"released_{unusable}"
    now_s = services.clock()
    retained = [*prompt.ids.ids, *(end.token_ids or ())][: params[REMOTE_NUM_TOKENS]]
    engine_id = str(params[REMOTE_ENGINE_ID])
    reference = KVReference(
        reference_id=services.ledger.next_id(),
        decode=decode.url,
        engine_id=engine_id,
        params=msgspec.json.encode(params),
        num_tokens=params[REMOTE_NUM_TOKENS],
        block_size=block_size,
        prefixes=services.fingerprinter.prefixes(retained),
        deadline_s=services.deadlines.deadline_s(engine_id, params.get(REMOTE_EXPIRY_TIME), now_s),
        boundaries=tuple(prompt.boundaries),
        conversation=request.conversation,
    )
    release_claimed(services.ledger.file(reference, supersedes), services)
    return "filed" if end.token_ids is not None else "filed_prompt_only"


def release_claimed(references: Iterable[ClaimedReference], services: Services) -> None:
    """Have D free what fell out of the ledger unused."""
    for claimed in references:
        services.metrics.references.labels(outcome="superseded").inc()
        release(claimed.params, services)


def release(params: dict[str, Any], services: Services) -> None:
    """Have D free a reference's blocks, by way of whichever prefill node is usable then."""
    services.releases.soon(lambda: usable_url(services.fleet.prefills), params)


def usable_url(engines: Iterable[Engine]) -> str | None:
    """The first usable engine, if any."""
    return next((engine.url for engine in engines if engine.usable), None)
