"""The D leg: D reads P's blocks and answers; the answer passes through."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvloop.engines.client import (
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    StreamReply,
)
from kvloop.turn.bodies import decode_body
from kvloop.turn.errors import TurnFailedError
from kvloop.turn.filing import usable_url

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

    Raises TurnFailedError; P's blocks are then given back.
    """
    params = prefilled.params if prefilled is not None else None
    body = decode_body(request, prompt.ids if prompt else None, params, want_reference=True)
    for engine in decodes:
        started_s = services.clock()
        leg = services.client.stream(
            engine.url,
            request.api.value,
            body,
            request.engine_headers,
            silence_timeout_s=services.timeouts.silence_s,
        )
        try:
            reply = await leg.__aenter__()
        except EngineUnreachableError as error:
            engine.lost(str(error))
            services.metrics.engine_errors.labels(leg="decode", kind="unreachable").inc()
            continue
        except EngineError as error:
            services.metrics.engine_errors.labels(leg="decode", kind=type(error).__name__).inc()
            raise _failed(error) from error
        except asyncio.CancelledError:
            # If D had the request already, it gives P's blocks back by itself; a second notice
            # is only counted there.
            _give_back(params, services)
            raise
        receipt.decode = engine.url
        receipt.decode_head_s = services.clock() - started_s
        services.metrics.leg_seconds.labels(leg="decode").observe(receipt.decode_head_s)
        try:
            yield engine, reply
        finally:
            await leg.__aexit__(None, None, None)
        return
    _give_back(params, services)
    raise TurnFailedError(503, "No decode node can be reached.", retry_after_s=1)


def _give_back(params: dict[str, Any] | None, services: Services) -> None:
    """Have P free the blocks that no D will read; the consumer of P's blocks is a D."""
    if params is not None:
        services.releases.soon(lambda: usable_url(services.fleet.decodes), params)


def _failed(error: EngineError) -> TurnFailedError:
    if isinstance(error, EngineTimeoutError):
        return TurnFailedError(504, "The decode node did not answer in time.")
    return TurnFailedError(502, "The decode node broke off before it answered.")
