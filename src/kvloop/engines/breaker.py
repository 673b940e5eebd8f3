"""A circuit breaker: an engine that fails again and again is left alone for a while.

Pure: the time is passed in. After the pause one request tries it; while that is out, others go
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Whether requests pass."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """They do not, until the pause is over."""
    HALF_OPEN = "half_open"
    """One may try."""


@dataclass(slots=True)
class Breaker:
    """Opens after ``max_failures`` in a row; each failed trial doubles the pause."""

    max_failures: int = 5
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    _failures: int = 0
    _pause_s: float = 0.0
    _opened_s: float | None = None
    _trial_out: bool = False

    def state(self, now_s: float) -> BreakerState:
        """Open, half open or closed at ``now_s``."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        if now_s < self._opened_s + self._pause_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def accepts(self, now_s: float) -> bool:
        """Whether a request should be sent: closed, or half open and nobody is trying."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._trial_out
        )

    def wait_s(self, now_s: float) -> float:
        """Seconds until it may be tried; 0 unless open."""
        if self._opened_s is None:
            return 0.0
        return max(0.0, self._opened_s + self._pause_s - now_s)

    def began(self, now_s: float) -> None:
        """A request is on its way; its end must be told by one of the three below."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._trial_out = True

    def succeeded(self) -> None:
        """The engine answered: whatever was, is over."""
        self._failures, self._pause_s = 0, 0.0
        self._opened_s, self._trial_out = None, False

    def failed(self, now_s: float) -> None:
        """The engine hung, broke off or said that it cannot serve."""
        was = self.state(now_s)
        self._failures += 1
        self._trial_out = False
        if was is BreakerState.HALF_OPEN:
            self._open(now_s, min(2 * self._pause_s, self.longest_pause_s))
        elif was is BreakerState.CLOSED and self._failures >= self.max_failures:
            self._open(now_s, self.first_pause_s)

    def answered(self, status: int, now_s: float) -> None:
        """It gave an HTTP answer. 502, 503 and 504 say that it cannot serve.

        500 does not: a request may be its cause, and nobody must be able to shut an engine out.
        """
        if status in (502, 503, 504):
            self.failed(now_s)
        else:
            self.succeeded()

    def undecided(self) -> None:
        """The request ended without saying anything about the engine (its client left)."""
        self._trial_out = False

    def _open(self, now_s: float, pause_s: float) -> None:
        self._opened_s, self._pause_s = now_s, pause_s
