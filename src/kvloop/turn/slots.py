"""A turn's place on an engine, or the answer that there is none."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvloop.engines.gate import GateClosedError, QueueFullError
from kvloop.turn.errors import TurnFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvloop.engines.fleet import Engine
    from kvloop.turn.services import Services


@asynccontextmanager
async def slot(engine: Engine, services: Services) -> AsyncGenerator[None]:
    """Wait for a place on ``engine`` and keep it. Raises TurnFailedError."""
    if engine.gate is None:
        yield
        return
    try:
        async with engine.gate.slot(services.timeouts.queue_s):
            yield
    except GateClosedError as error:
        role = engine.role.value
        services.metrics.shed.labels(role=role, why=type(error).__name__).inc()
        status = 429 if isinstance(error, QueueFullError) else 503
        raise TurnFailedError(
            status, f"The {role} nodes are busy: {error}. Try again later.", error.retry_after_s
        ) from error
