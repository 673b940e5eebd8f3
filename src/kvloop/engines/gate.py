"""A bounded number of requests on an engine, and a bounded queue in front of it.

vLLM queues without bound, so a fleet that is too small answers everybody late. Here those who wait
are counted, served in order, and told to come back when there are too many of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

_SMOOTHING: Final = 0.1
"""Weight of the newest duration in the running mean."""
_LONGEST_RETRY_S: Final = 60


class GateClosedError(Exception):
    """No room: the queue is full, or the wait was too long."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class QueueFullError(GateClosedError):
    """More would wait than may."""


class QueueTimeoutError(GateClosedError):
    """The turn to be served did not come in time."""


class Gate:
    """First come, first served; on one event loop."""

    def __init__(self, limit: int, queue_limit: int, clock: Callable[[], float]) -> None:
        """``limit`` requests at once, ``queue_limit`` more may wait; ``clock``: seconds."""
        self._limit = limit
        self._queue_limit = queue_limit
        self._clock = clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self._mean_s = 0.0
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether one more would be turned away."""
        return self.running >= self._limit and len(self._queue) >= self._queue_limit

    @property
    def retry_after_s(self) -> int:
        """When it may be worth coming back: what waits now, at the pace of late."""
        estimate = self._mean_s * (len(self._queue) + 1) / self._limit
        return max(1, min(_LONGEST_RETRY_S, math.ceil(estimate)))

    @asynccontextmanager
    async def slot(self, timeout_s: float) -> AsyncGenerator[None]:
        """A place on the engine. Raises QueueFullError or QueueTimeoutError."""
        await self._enter(timeout_s)
        started_s = self._clock()
        try:
            yield
        finally:
            self._mean_s += _SMOOTHING * (self._clock() - started_s - self._mean_s)
            self._leave()

    async def _enter(self, timeout_s: float) -> None:
        if self.running < self._limit:
            self.running += 1
            return
        if len(self._queue) >= self._queue_limit:
            raise QueueFullError("too many requests wait already", self.retry_after_s)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place  # `_leave` hands its own place on; `running` counts us already
        except TimeoutError as error:
            self._give_up(place)
            raise QueueTimeoutError("the wait was too long", self.retry_after_s) from error
        except asyncio.CancelledError:
            self._give_up(place)
            raise

    def _give_up(self, place: asyncio.Future[None]) -> None:
        if place.cancelled():
            self._queue.remove(place)
        else:  # it was given to us in this very moment
            self._leave()

    def _leave(self) -> None:
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1
