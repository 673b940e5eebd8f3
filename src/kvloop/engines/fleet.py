"""The engines that this router drives, and how each of them is right now.

State only; the monitor feeds it, turns read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvloop.engines.breaker import Breaker, BreakerState
from kvloop.policy.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvloop.engines.facts import EngineFacts, EngineLoad
    from kvloop.engines.gate import Gate


_MAX_RELEASE_CHECKS = 20
"""An engine that is never idle is left alone."""


class Role(Enum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    RENDER = "render"


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. Changed by its fleet's monitor and by turns that could not reach it."""

    url: str
    role: Role
    facts: EngineFacts | None = None
    """None until it was seen healthy for the first time."""
    engine_id: str | None = None
    """Of the life that its last reference came from."""
    has_new_id: bool = False
    """Whether that id told us of a restart which no probe has seen yet."""
    trouble: str | None = "not seen yet"
    """Why it cannot be used now; None if it can."""
    late_probes: int = 0
    """Probes in a row that were not answered in time."""
    frees_on_release: bool | None = None
    """Whether this life of it frees blocks that are released without a read; None: not tried."""
    release_checks: int = 0
    """How often that was tried in this life."""
    residency: Residency = field(default_factory=lambda: Residency(0))
    breaker: Breaker = field(default_factory=Breaker)
    load: EngineLoad | None = None
    """At the last look; None before the first."""
    gate: Gate | None = None
    """Bounds what it is given at once; None: unbounded."""

    @property
    def usable(self) -> bool:
        """Whether a turn may be sent to it."""
        return self.trouble is None and self.facts is not None

    @property
    def is_release_to_be_tried(self) -> bool:
        """Whether it is worth finding out if it frees blocks that are released unread."""
        return (
            self.usable
            and self.facts is not None
            and not self.facts.claims  # it pins nothing
            and self.frees_on_release is None
            and self.release_checks < _MAX_RELEASE_CHECKS
        )

    def seen(self, facts: EngineFacts) -> bool:
        """It is healthy; returns whether it is another process than before."""
        restarted = self.facts is not None and self.facts.started_s != facts.started_s
        if restarted:
            self.breaker = Breaker()
            self.frees_on_release = None
            self.release_checks = 0
        if self.facts is None or restarted:
            self.residency = Residency(facts.kv_capacity_tokens if facts.prefix_caching else 0)
        self.facts = facts
        self.trouble = None
        self.late_probes = 0
        return restarted

    def lost(self, trouble: str) -> None:
        """It cannot be used until it is seen again."""
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines by role, in the order in which they were configured."""

    prefills: tuple[Engine, ...]
    decodes: tuple[Engine, ...]
    renders: tuple[Engine, ...] = ()

    @classmethod
    def of(
        cls,
        prefill: Iterable[str],
        decode: Iterable[str],
        render: Iterable[str] = (),
        gate_of: Callable[[Role], Gate | None] = lambda _: None,
    ) -> Fleet:
        """A fleet of engines at these URLs; ``gate_of`` makes each one's gate."""

        def engines(urls: Iterable[str], role: Role) -> tuple[Engine, ...]:
            return tuple(Engine(url, role, gate=gate_of(role)) for url in urls)

        return cls(
            engines(prefill, Role.PREFILL),
            engines(decode, Role.DECODE),
            engines(render, Role.RENDER),
        )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every engine."""
        return (*self.prefills, *self.decodes, *self.renders)

    def engine(self, url: str) -> Engine:
        """The engine of that URL (a policy's node name). Raises KeyError."""
        for engine in self.engines:
            if engine.url == url:
                return engine
        raise KeyError(url)

    def missing(self) -> list[str]:
        """What keeps the router from serving at all; empty if it can serve."""
        missing = []
        for name, engines in (("prefill", self.prefills), ("decode", self.decodes)):
            if not any(engine.usable for engine in engines):
                reasons = "; ".join(f"{engine.url}: {engine.trouble}" for engine in engines)
                missing.append(f"no usable {name} node ({reasons})")
        return missing


def serving(engines: Iterable[Engine], model: str | None, now_s: float) -> list[Engine]:
    """Engines that may be sent a turn for ``model``: those that list it; all if none does (they
    then say so themselves).

    Left out are engines whose breaker is open, those that somebody else is trying out, and those
    whose queue is full, the last two only where others remain.
    """
    usable = [
        engine
        for engine in engines
        if engine.usable and engine.breaker.state(now_s) is not BreakerState.OPEN
    ]
    listed = [
        engine
        for engine in usable
        if engine.facts is not None and model in engine.facts.model_names
    ]
    chosen = listed or usable
    free = [
        engine
        for engine in chosen
        if engine.breaker.accepts(now_s) and not (engine.gate and engine.gate.is_full)
    ]
    return free or chosen
