"""The P leg: P computes the prompt, reading what was proven from D, and keeps its KV for D.

Whatever a pull runs into, it is tried once more cold: a failed attach must not cost an answer.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvloop.engines.client import (
    EngineBrokenError,
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    Reply,
)
from kvloop.turn.bodies import prefill_body
from kvloop.turn.errors import EngineRefusedError, TurnFailedError
from kvloop.turn.releasing import release_prefilled
from kvloop.turn.slots import slot
from kvloop.wire import CLAIM_HOLDERS, CLAIM_REPORT, REFERENCE_FIELDS, REMOTE_CACHED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvloop.engines.fleet import Engine
    from kvloop.observe.receipt import Receipt
    from kvloop.turn.attachment import Attachment
    from kvloop.turn.plan import Plan, ProvenPrompt
    from kvloop.turn.request import TurnRequest
    from kvloop.turn.services import Services

logger = logging.getLogger("kvloop.turn")


class ClaimReport(msgspec.Struct):
    """What P's connector says of its claim (:func:`kvloop.wire.claim_report`)."""

    asked_tokens: int = 0
    granted_tokens: int = 0
    why: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What P left for D."""

    engine: Engine
    params: dict[str, Any] | None
    """For D as they came; None where P kept nothing: D then computes by itself."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens that P did not compute: read from D or found in its own cache."""
    claim: ClaimReport | None = None
    """What became of P's claim, where it made one."""


async def run_prefill(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    plan: Plan,
    attachment: Attachment,
    prefills: Sequence[Engine],
    receipt: Receipt,
    services: Services,
) -> Prefilled:
    """Run the P leg. Raises EngineRefusedError or TurnFailedError."""
    chosen = _first(prefills, receipt.prefill)
    async with slot(chosen, services):
        if plan.attach is not None or plan.holders:
            pulled = await _pull(request, prompt, plan, attachment, chosen, receipt, services)
            if pulled is not None:
                return pulled
            receipt.route = "recompute"
            if not chosen.usable:
                prefills = [engine for engine in prefills if engine is not chosen]
        return await _compute(request, prompt, _order(prefills, chosen), receipt, services)


async def _pull(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    plan: Plan,
    attachment: Attachment,
    engine: Engine,
    receipt: Receipt,
    services: Services,
) -> Prefilled | None:
    """P's leg with a reference or holders to ask; None if it must be done again cold."""
    reuse = plan.attach
    if reuse is None:
        reuse = {CLAIM_HOLDERS: plan.holders}
    elif not attachment.in_time(services.clock()):
        receipt.why = "reference_lapsed"
        attachment.release()
        return None
    more = services.canary.asked_of_p(request) if prompt is not None else {}
    body = prefill_body(request, prompt.ids if prompt else None, reuse, more)
    breaker = services.pairs.breaker(engine.url, plan.source)
    attachment = attachment.hand_over()  # it ends with the leg, which may outlive the turn

    def left(reply: Reply | None) -> None:
        breaker.undecided()
        if reply is not None and reply.status == 200:
            attachment.was_read()
            release_prefilled(_read(engine, reply).params, services)
        attachment.release()

    breaker.began(services.clock())
    try:
        reply = await _post(engine, request, body, services.timeouts.pull_s, left, services)
    except EngineError as error:
        receipt.cold_retry = type(error).__name__
        if isinstance(error, EngineUnreachableError):
            breaker.undecided()  # it says nothing of what is between the two
        else:
            breaker.failed(services.clock())
    else:
        if reply.status == 200:
            breaker.succeeded()
            engine.breaker.succeeded()
            attachment.was_read()
            services.canary.soon(request, prompt, reply.body, engine.url, plan.source)
            return _read(engine, reply)
        receipt.cold_retry = f"status_{reply.status}"
        if reply.status >= 500:
            breaker.failed(services.clock())
        else:
            breaker.undecided()
    attachment.release()
    receipt.why = "pull_refused"
    services.metrics.cold_retries.labels(why=receipt.cold_retry).inc()
    logger.warning(
        "turn %s: prefill node %s refused the pull (%s); computing instead",
        request.request_id,
        engine.url,
        receipt.cold_retry,
    )
    return None


async def _compute(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    prefills: Sequence[Engine],
    receipt: Receipt,
    services: Services,
) -> Prefilled:
    """P's leg without a reference, on the first engine that takes it."""
    body = prefill_body(request, prompt.ids if prompt else None, None)
    broken: EngineBrokenError | None = None
    # A kept connection may be dead because the engine was restarted: the first gets another try.
    for engine in (*prefills, *prefills[:1]):
        # The turn has a place on the chosen one already.
        has_place = engine.url == receipt.prefill
        try:
            async with nullcontext() if has_place else slot(engine, services):
                reply = await _cold(engine, request, body, services)
        except EngineUnreachableError:
            continue
        except EngineBrokenError as error:
            broken = error
            continue
        except EngineTimeoutError as error:
            raise TurnFailedError(504, "The prefill node did not answer in time.") from error
        receipt.prefill = engine.url
        if reply.status != 200:
            raise EngineRefusedError(reply)
        return _read(engine, reply)
    if broken is not None:
        raise TurnFailedError(502, "The prefill node broke off while computing.") from broken
    raise TurnFailedError(503, "No prefill node can be reached.", retry_after_s=1)


async def _cold(engine: Engine, request: TurnRequest, body: bytes, services: Services) -> Reply:
    """One try of a leg without a reference; what it says of the engine goes to its breaker."""

    def left(reply: Reply | None) -> None:
        engine.breaker.undecided()
        if reply is not None and reply.status == 200:
            release_prefilled(_read(engine, reply).params, services)

    engine.breaker.began(services.clock())
    try:
        reply = await _post(engine, request, body, services.timeouts.prefill_s, left, services)
    except EngineUnreachableError:
        engine.breaker.undecided()  # it is lost until it is seen again
        raise
    except EngineError:
        engine.breaker.failed(services.clock())
        raise
    engine.breaker.answered(reply.status, services.clock())
    return reply


async def _post(
    engine: Engine,
    request: TurnRequest,
    body: bytes,
    timeout_s: float,
    left: Callable[[Reply | None], None],
    services: Services,
) -> Reply:
    """P's answer. ``left`` is told how it ended when the client did not wait for it."""
    started_s = services.clock()
    leg = asyncio.ensure_future(
        services.client.post(
            engine.url, request.api.value, body, request.engine_headers, timeout_s=timeout_s
        )
    )
    try:
        return await asyncio.shield(leg)
    except asyncio.CancelledError:
        services.orphans.adopt(leg, left)
        raise
    except EngineError as error:
        services.metrics.engine_errors.labels(leg="prefill", kind=type(error).__name__).inc()
        if isinstance(error, EngineUnreachableError):
            engine.lost(str(error))
        raise
    finally:
        services.metrics.leg_seconds.labels(leg="prefill").observe(services.clock() - started_s)


def _read(engine: Engine, reply: Reply) -> Prefilled:
    try:
        answer = msgspec.json.decode(reply.body, type=_Answer)
    except msgspec.DecodeError as error:
        raise TurnFailedError(502, "The prefill node's answer cannot be read.") from error
    params = answer.kv_transfer_params
    if params is not None and (
        not params.get("do_remote_prefill")
        or any(params.get(field) in (None, "", []) for field in REFERENCE_FIELDS)
    ):
        # D would trip over it (AssertionError in its scheduler); it can compute by itself.
        logger.warning("prefill node %s kept no blocks for the decode node", engine.url)
        params = None
    report = params.pop(CLAIM_REPORT, None) if params is not None else None
    cached = params.get(REMOTE_CACHED_TOKENS) if params is not None else None
    return Prefilled(
        engine=engine,
        params=params,
        prompt_tokens=answer.usage.prompt_tokens if answer.usage is not None else None,
        cached_tokens=cached if isinstance(cached, int) else None,
        claim=msgspec.convert(report, ClaimReport) if report is not None else None,
    )


def _first(engines: Sequence[Engine], url: str | None) -> Engine:
    return next(engine for engine in engines if engine.url == url)


def _order(engines: Sequence[Engine], first: Engine) -> list[Engine]:
    """The chosen engine, then the others."""
    return sorted(engines, key=lambda engine: engine is not first)
