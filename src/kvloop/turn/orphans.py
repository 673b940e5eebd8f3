"""P legs whose clients have left.

Closing the connection makes vLLM abort the request. But a P that has just finished keeps its
blocks for a D that will never come, until their lease ends (30 s). So P is given a short grace to
answer, and what it then kept is given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvloop.engines.client import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloop.engines.client import Reply
    from kvloop.observe.metrics import Metrics


class Orphans:
    """Looks after them, as long as the router runs."""

    def __init__(self, grace_s: float, metrics: Metrics) -> None:
        self._grace_s = grace_s
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, leg: asyncio.Task[Reply], ended: Callable[[Reply | None], None]) -> None:
        """See ``leg`` to its end; ``ended`` gets P's answer, None if there is none."""
        task = asyncio.get_running_loop().create_task(self._await(leg, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until none is left: the grace at most."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _await(self, leg: asyncio.Task[Reply], ended: Callable[[Reply | None], None]) -> None:
        reply = None
        try:
            async with asyncio.timeout(self._grace_s):
                reply = await leg
        except TimeoutError:
            outcome = "aborted"
        except EngineError:
            outcome = "failed"
        else:
            outcome = "answered"
        self._metrics.orphans.labels(outcome=outcome).inc()
        ended(reply)
