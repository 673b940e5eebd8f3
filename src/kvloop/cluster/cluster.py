"""Several engines on one machine, started together and stopped together.

Ownership and progress only: what an engine is told is in ``engine_spec``, how a process lives and
dies in ``process``.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final, Self

from kvloop.cluster.engine_spec import EngineSpec, engine_command, engine_environment
from kvloop.cluster.process import ChildProcess, EngineStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from kvloop.engines.fleet import Role

READY_TIMEOUT_S: Final = 300.0
_REPORT_EVERY_S: Final = 10.0


class LocalCluster:
    """Engines that live as long as the ``async with``; nothing of them outlives it.

    ``async with LocalCluster(specs, run_dir, print) as cluster: cluster.url("prefill-0")``
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        run_dir: Path,
        report: Callable[[str], None],
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
        command: Callable[[EngineSpec], list[str]] = engine_command,
    ) -> None:
        """``run_dir``: where the logs go; ``report``: is told of progress, a line at a time.

        ``command``: what to run for an engine, for those who run something else than vLLM.
        """
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) < len(specs):
            raise ValueError("two engines have the same name; names say which is meant")
        self._report = report
        self._ready_timeout_s = ready_timeout_s
        self._children = {
            spec.name: ChildProcess(
                spec.name,
                command(spec),
                engine_environment(spec, os.environ),
                run_dir / f"{spec.name}.log",
                spec.cores,
            )
            for spec in specs
        }

    async def __aenter__(self) -> Self:
        """All engines, ready. Raises EngineStartError of the first that fails; none is left."""
        try:
            for name in self._children:
                self.start(name)
            await self._all_ready()
        except BaseException:
            await self._stop_all()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop_all()

    def url(self, name: str) -> str:
        """The engine's address; it stays the same over restarts."""
        return self.specs[name].url

    def urls(self, role: Role) -> tuple[str, ...]:
        """Addresses of all engines of a role."""
        return tuple(spec.url for spec in self.specs.values() if spec.role is role)

    def log(self, name: str) -> Path:
        """The engine's log; a restart appends to it."""
        return self._children[name].log

    def running(self, name: str) -> bool:
        """Whether any process of the engine is alive."""
        return self._children[name].running

    def start(self, name: str) -> None:
        """Start an engine that does not run; :meth:`ready` tells when it serves."""
        self._children[name].start()

    async def ready(self, name: str) -> None:
        """Wait until the engine serves. Raises EngineStartError."""
        await self._children[name].wait_ready(f"{self.url(name)}/health", self._ready_timeout_s)

    async def stop(self, name: str) -> None:
        """Stop an engine in good order; returns when nothing of it is left."""
        await self._children[name].stop()

    async def kill(self, name: str) -> None:
        """End an engine as ``kill -9`` of all its processes; returns when they are gone."""
        await self._children[name].kill()

    async def restart(self, name: str) -> None:
        """Stop an engine if it runs, start it on the same ports, wait until it serves."""
        await self.stop(name)
        started_s = time.monotonic()
        self.start(name)
        await self.ready(name)
        self._report(f"{name} ready again after {time.monotonic() - started_s:.0f} s")

    async def _all_ready(self) -> None:
        started_s = time.monotonic()
        waiting = set(self._children)

        async def wait_for(name: str) -> None:
            await self.ready(name)
            waiting.discard(name)
            self._report(f"{name} ready after {time.monotonic() - started_s:.0f} s")

        async def tell() -> None:
            while True:
                await asyncio.sleep(_REPORT_EVERY_S)
                elapsed_s = time.monotonic() - started_s
                self._report(f"waiting for {', '.join(sorted(waiting))} ({elapsed_s:.0f} s)")

        try:
            async with asyncio.TaskGroup() as group:
                teller = group.create_task(tell())
                await asyncio.wait([group.create_task(wait_for(name)) for name in self._children])
                teller.cancel()
        except ExceptionGroup as failures:
            start_errors, others = failures.split(EngineStartError)
            if start_errors is None or others is not None:
                raise
            raise start_errors.exceptions[0] from None  # the first is why the others were ended

    async def _stop_all(self) -> None:
        """In good order; whoever cancels this (a second Ctrl-C) gets the quick way."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children.values():
                    group.create_task(child.stop())
        finally:
            for child in self._children.values():
                child.kill_now()
