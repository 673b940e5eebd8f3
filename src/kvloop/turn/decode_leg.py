"""The D leg: D reads P's blocks and answers; the answer passes through."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from kvloop.engines.client import (
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    StreamReply,
)
from kvloop.turn.bodies import decode_body
from kvloop.turn.errors import TurnFailedError
from kvloop.turn.releasing import release_prefilled
from kvloop.turn.slots import slot

_LEASE_MARGIN_S = 5.0

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from kvloop.engines.fleet import Engine
    from kvloop.observe.receipt import Receipt
    from kvloop.turn.plan import ProvenPrompt
    from kvloop.turn.prefill_leg import Prefilled
    from kvloop.turn.request import TurnRequest
    from kvloop.turn.services import Services


@asynccontextmanager
async def open_decode(
    request: TurnRequest,
    prompt: ProvenPrompt | None,
    prefilled: Prefilled | None,
    decodes: Sequence[Engine],
    receipt: Receipt,
    services: Services,
) -> AsyncGenerator[tuple[Engine, StreamReply]]:
    """D's answer, opened on the first engine of ``decodes`` that takes the request.

    The caller has a place on the first of them. Raises TurnFailedError; P's blocks are then given
    back.
    """
    params = prefilled.params if prefilled is not None else None
    body = decode_body(request, prompt.ids if prompt else None, params)
    async with AsyncExitStack() as held:
        try:
            engine, reply = await _first_answer(request, body, decodes, held, receipt, services)
        except BaseException:
            # If D had the request already, it gives P's blocks back by itself; a second notice
            # is only counted there.
            release_prefilled(params, services)
            raise
        yield engine, reply


async def _first_answer(
    request: TurnRequest,
    body: bytes,
    decodes: Sequence[Engine],
    held: AsyncExitStack,
    receipt: Receipt,
    services: Services,
) -> tuple[Engine, StreamReply]:
    """The head of D's answer; ``held`` closes it, and with it what D still does for it."""
    for engine in decodes:
        if engine is not decodes[0]:
            await held.enter_async_context(slot(engine, services))
        started_s = services.clock()
        try:
            reply = await _open(engine, request, body, held, services)
        except EngineUnreachableError:
            continue
        except EngineTimeoutError as error:
            raise TurnFailedError(504, "The decode node did not answer in time.") from error
        except EngineError as error:
            raise TurnFailedError(502, "The decode node broke off before it answered.") from error
        receipt.decode = engine.url
        receipt.decode_head_s = services.clock() - started_s
        services.metrics.leg_seconds.labels(leg="decode").observe(receipt.decode_head_s)
        return engine, reply
    raise TurnFailedError(503, "No decode node can be reached.", retry_after_s=1)


async def _open(
    engine: Engine, request: TurnRequest, body: bytes, held: AsyncExitStack, services: Services
) -> StreamReply:
    """One engine's answer; what this says of the engine goes to its breaker."""
    leg = services.client.stream(
        engine.url,
        request.api.value,
        body,
        request.engine_headers,
        silence_timeout_s=services.timeouts.silence_s,
    )
    engine.breaker.began(services.clock())
    try:
        async with asyncio.timeout(_longest_wait_s(request, services)):
            reply = await held.enter_async_context(leg)
    except TimeoutError as error:
        timeout = EngineTimeoutError(engine.url, "did not begin to answer in time")
        _note_error(engine, timeout, services)
        raise timeout from error
    except EngineError as error:
        _note_error(engine, error, services)
        raise
    except asyncio.CancelledError:
        engine.breaker.undecided()
        raise
    engine.breaker.answered(reply.status, services.clock())
    return reply


def _longest_wait_s(request: TurnRequest, services: Services) -> float:
    """For the head of D's answer.

    vLLM sends a stream's head when it has taken the request, and from then on renews P's lease. A
    D that takes it later reads blocks that P has freed, and answers from whatever is in them
    (known failure 15). The head of a whole answer says nothing: it comes with the answer.
    """
    timeouts = services.timeouts
    if not request.streamed:
        return timeouts.decode_s
    return min(timeouts.first_byte_s, max(1.0, timeouts.lease_s - _LEASE_MARGIN_S))


def _note_error(engine: Engine, error: EngineError, services: Services) -> None:
    services.metrics.engine_errors.labels(leg="decode", kind=type(error).__name__).inc()
    if isinstance(error, EngineUnreachableError):
        engine.lost(str(error))
        engine.breaker.undecided()
    else:
        engine.breaker.failed(services.clock())
