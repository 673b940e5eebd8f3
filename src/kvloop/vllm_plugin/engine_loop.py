"""A way into vLLM's engine loop: run something on its thread, between two steps.

``BlockPool`` and the scheduler belong to that thread and have no locks. vLLM wakes the loop with a
sentinel of its own (``EngineCoreRequestType.WAKEUP``), which it handles by doing nothing; here is
what then happens besides.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable

_visitors: list[Visitor] = []
"""One for each connector of this process; there is one engine core in it."""


class Visitor(Protocol):
    """Somebody who has something to do on the loop's thread."""

    def attached(self, loop: EngineLoop) -> None:
        """The loop exists now."""

    def visit(self, loop: EngineLoop) -> None:
        """Do it: the loop is between two steps."""


class EngineLoop:
    """What a visitor may know of vLLM's engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def wake(self) -> None:
        """Have the visitors visit soon; from any thread."""
        from vllm.v1.engine import EngineCoreRequestType

        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def steps_in_flight(self) -> list[Hashable]:
        """Names of the steps that were scheduled and whose outputs were not worked on yet."""
        queue = self._core.batch_queue
        return [] if queue is None else [id(entry[1]) for entry in queue]


def welcome(visitor: Visitor) -> None:
    """Let ``visitor`` in, once this process's engine core has been constructed."""
    _visitors.append(visitor)


def patch(module: Any) -> None:
    """Open vLLM's engine cores to visitors.

    vLLM loads plugins while it constructs the core, so the loop's start is the first moment at
    which a core is both complete and ours to wrap.
    """
    for core in (module.EngineCoreProc, module.DPEngineCoreProc):
        if "run_busy_loop" in vars(core):
            _attach_at_start(core)
    _visit_when_woken(module.EngineCoreProc, module.EngineCoreRequestType.WAKEUP)


def _attach_at_start(core: Any) -> None:
    original = core.run_busy_loop

    @wraps(original)
    def attach_and_run(self: Any) -> Any:
        loop = self.kvloop_engine_loop = EngineLoop(self)
        for visitor in _visitors:
            visitor.attached(loop)
        return original(self)

    core.run_busy_loop = attach_and_run


def _visit_when_woken(core: Any, wakeup: Any) -> None:
    original = core._handle_client_request

    @wraps(original)
    def handle_and_visit(self: Any, request_type: Any, request: Any) -> Any:
        if request_type == wakeup and hasattr(self, "kvloop_engine_loop"):
            for visitor in _visitors:
                visitor.visit(self.kvloop_engine_loop)
        return original(self, request_type, request)

    core._handle_client_request = handle_and_visit
