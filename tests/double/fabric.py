"""What lies between the engines: the registry by which they find each other, the clock, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.double.engine import Engine


class RefusedError(Exception):
    """The engine answers with an error."""

    def __init__(
        self, status: int, message: str = "Internal server error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class InvalidError(RefusedError):
    """A body that vLLM's data model refuses, which it answers under another name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, param)


class LoadFailedError(RefusedError):
    """A failed read under ``kv_load_failure_policy: fail``. A stream has begun by then."""

    def __init__(self) -> None:
        super().__init__(500)


class DiedError(RefusedError):
    """The engine has just died of this request."""

    def __init__(self) -> None:
        super().__init__(500, "EngineCore encountered an issue. See stack trace (above).")


class HangError(Exception):
    """The request waits for a load that nobody starts."""


class Handover(NamedTuple):
    """One read of one engine's blocks by another."""

    producer: str
    request_id: str
    """Of the producer; empty for a claim."""
    produced_for: str
    read_for: str
    """Clients' request ids."""
    was_pinned: bool


@dataclass
class Fabric:
    """NIXL between the engines, and a clock that stands still until ``now_s`` is moved.

    ``source`` replaces the clock by a real one.
    """

    now_s: float = 0.0
    source: Callable[[], float] | None = None
    engines: dict[str, Engine] = field(default_factory=dict)
    read_tokens: int = 0
    handovers: list[Handover] = field(default_factory=list)
    """Every read so far."""
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(5600))

    def clock(self) -> float:
        return self.now_s if self.source is None else self.source()

    def at(self, host: str, claim_port: int) -> Engine | None:
        """The engine that answers claims there."""
        for engine in self.engines.values():
            if (engine.side_host, engine.side_port + 1000) == (host, claim_port):
                return None if engine.dead or not engine.claims else engine
        return None

    def find(self, params: dict[str, Any]) -> Engine | None:
        """The engine that a reference points at: same life, same side channel, still there."""
        engine = self.engines.get(params.get("remote_engine_id", ""))
        if engine is None or engine.dead:
            return None
        address = (params.get("remote_host"), params.get("remote_port"))
        return engine if address == (engine.side_host, engine.side_port) else None
