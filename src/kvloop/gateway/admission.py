"""Which turns are let in: so many at once, so many of one tenant, none while the router stops.

Decided before a body is read: what is turned away must cost next to nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvloop.gateway.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Generator

_RETRY = {"retry-after": "1"}


class Admission:
    """Counts the turns in this process; each is admitted in the task that serves it."""

    def __init__(self, max_turns: int, max_turns_per_tenant: int) -> None:
        """``max_turns_per_tenant``: 0 is no limit."""
        self._max_turns = max_turns
        self._max_per_tenant = max_turns_per_tenant
        self._tasks: set[asyncio.Task[Any]] = set()
        self._by_tenant: Counter[str] = Counter()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def turn(self, tenant: str) -> Generator[None]:
        """A place for one turn. Raises RefusedError."""
        self._check(tenant)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a turn is admitted in the task that serves it")
        self._tasks.add(task)
        self._by_tenant[tenant] += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            if not self._tasks:
                self._none_left.set()

    async def drain(self, timeout_s: float, cut_off_s: float) -> None:
        """Let in no more turns, wait until those that run have ended, then cancel them.

        ``cut_off_s``: the longest wait for the cancelled ones.
        """
        self.draining = True
        await self._ended(timeout_s)
        for task in self._tasks:
            task.cancel()
        await self._ended(cut_off_s)

    async def _ended(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            return

    def _check(self, tenant: str) -> None:
        if self.draining:
            message = "The router is shutting down. Try again; another one will answer."
            raise RefusedError(503, message, {**_RETRY, "connection": "close"})
        if len(self._tasks) >= self._max_turns:
            message = f"The router serves {self._max_turns} turns already. Try again later."
            raise RefusedError(429, message, _RETRY)
        if self._max_per_tenant and self._by_tenant[tenant] >= self._max_per_tenant:
            message = f"You have {self._max_per_tenant} turns running already. Wait for one to end."
            raise RefusedError(429, message, _RETRY)
