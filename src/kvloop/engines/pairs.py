"""Which decode nodes a prefill node should not read from, for now or until further notice.

A pull that fails costs its turn the time of the failure. Two engines between which pulls fail
again and again (a link that is down, versions that do not agree, clocks apart) are therefore left
to compute for a while; two whose answers diverged (the canary's business) until an operator or a
restart clears them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvloop.engines.breaker import Breaker

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_FAILURES: Final = 3
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 300.0


@dataclass(slots=True)
class _Pair:
    breaker: Breaker = field(
        default_factory=lambda: Breaker(_MAX_FAILURES, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    )
    off: str | None = None


class Pairs:
    """State of every (prefill, decode) pair that something was noted of; nodes by name."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def barred(self, prefill: str, now_s: float) -> frozenset[str]:
        """Decode nodes that ``prefill`` must not read from now."""
        return frozenset(
            decode
            for (node, decode), pair in self._pairs.items()
            if node == prefill and (pair.off is not None or not pair.breaker.accepts(now_s))
        )

    def breaker(self, prefill: str, decode: str) -> Breaker:
        """The breaker of a pair's pulls."""
        return self._pairs.setdefault((prefill, decode), _Pair()).breaker

    def switch_off(self, prefill: str, decode: str, why: str) -> None:
        """No pulls between these two until :meth:`reset` or a restart."""
        self._pairs.setdefault((prefill, decode), _Pair()).off = why

    def reset(self, prefill: str, decode: str) -> bool:
        """An operator says that it is well again; False if there was nothing to reset."""
        return self._pairs.pop((prefill, decode), None) is not None

    def restarted(self, engine: str) -> None:
        """What was noted of an engine's earlier life says nothing of this one."""
        self._pairs = {names: pair for names, pair in self._pairs.items() if engine not in names}

    def switched_off(self) -> Iterator[tuple[str, str, str]]:
        """Prefill, decode and reason of each pair that is off until further notice."""
        for (prefill, decode), pair in self._pairs.items():
            if pair.off is not None:
                yield prefill, decode, pair.off
