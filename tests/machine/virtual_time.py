"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappenError(Exception):
    """Every task waits for something that no timer and nobody else will bring: a hang."""


class _Selector(selectors.BaseSelector):
    """Never waits: moves the clock instead."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            raise NothingWillHappenError
        self.now_s += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time begins at 1,000 s and passes as fast as there is nothing to do."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return 1000.0 + self._virtual.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """As :func:`asyncio.run`, in virtual time. Raises NothingWillHappenError."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
