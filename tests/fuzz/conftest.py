"""A stack on an event loop of its own, for tests that are no coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tests.router.stack import Stack, opening, stack

T = TypeVar("T")

REQUEST_TIMEOUT_S = 0.3


@dataclass
class Served:
    """The stack, and what is asked of it in the end."""

    stack: Stack
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """In the stack's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=60)

    def assert_well(self) -> None:
        """It answers rightly, nothing is left behind, and nothing in it ever failed."""
        router = self.stack.router
        assert self.run(self.stack.chat(opening())).status == 200
        assert len(router.admission) == 0
        assert router.counters.unhandled._value.get() == 0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    begun = threading.Event()
    found: list[tuple[Served, asyncio.Event]] = []

    async def serve() -> None:
        settings = {"request_timeout_s": REQUEST_TIMEOUT_S, "max_body_bytes": 100_000}
        async with stack(settings=settings) as s:
            for engine in (*s.prefills, *s.decodes):
                engine.memory_timeout_s = 0.5  # for what asks for more than there is
            end = asyncio.Event()
            found.append((Served(s, asyncio.get_running_loop()), end))
            begun.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert begun.wait(timeout=30)
    (one, end) = found[0]
    yield one
    one.loop.call_soon_threadsafe(end.set)
    thread.join(timeout=30)
