"""The engines that this router drives, and how each of them is right now.

State only; the monitor feeds it, turns read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvloop.policy.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvloop.engines.facts import EngineFacts


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
    trouble: str | None = "not seen yet"
    """Why it cannot be used now; None if it can."""
    late_probes: int = 0
    """Probes in a row that were not answered in time."""
    residency: Residency = field(default_factory=lambda: Residency(0))

    @property
    def usable(self) -> bool:
        """Whether a turn may be sent to it."""
        return self.trouble is None and self.facts is not None

    def seen(self, facts: EngineFacts) -> bool:
        """It is healthy; returns whether it is another process than before."""
        restarted = self.facts is not None and self.facts.started_s != facts.started_s
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
    def of(cls, prefill: Iterable[str], decode: Iterable[str], render: Iterable[str] = ()) -> Fleet:
        """A fleet of engines at these URLs."""
        return cls(
            tuple(Engine(url, Role.PREFILL) for url in prefill),
            tuple(Engine(url, Role.DECODE) for url in decode),
            tuple(Engine(url, Role.RENDER) for url in render),
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


def serving(engines: Iterable[Engine], model: str | None) -> list[Engine]:
    """Usable engines that list the model; all usable ones if none does (they then say so)."""
    usable = [engine for engine in engines if engine.usable]
    listed = [
        engine
        for engine in usable
        if engine.facts is not None and model in engine.facts.model_names
    ]
    return listed or usable
