"""What each decode node pins for us: from its answer until we know that it is gone.

vLLM does not say what is pinned, so it is accounted for here. A pin ends when P has read it, when
D was told to free it, when D's time for it is over, or with D itself. Pure; the time is passed in.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

from kvloop.ledger.reference import same_life


class PinState(Enum):
    """Why D still pins it."""

    HELD = "held"
    """It may be claimed, or has just lapsed for us and not yet for D."""
    CLAIMED = "claimed"
    """P is about to read it."""
    LEAVING = "leaving"
    """D is being told to free it."""
    STUCK = "stuck"
    """D could not be told: only its time ends it."""


@dataclass(slots=True)
class _Pin:
    decode: str
    engine_id: str
    num_tokens: int
    state: PinState


class Pins:
    """The account, by decode node; pins are named by whoever makes them."""

    def __init__(self) -> None:
        self._pins: dict[int, _Pin] = {}
        self._ends: list[tuple[float, int]] = []
        self._tokens: dict[tuple[str, PinState], int] = {}

    def pinned(
        self, pin_id: int, decode: str, engine_id: str, num_tokens: int, ends_s: float
    ) -> None:
        """D pins ``num_tokens`` (whole blocks) until ``ends_s`` at the latest."""
        self._pins[pin_id] = _Pin(decode, engine_id, num_tokens, PinState.HELD)
        self._count(decode, PinState.HELD, num_tokens)
        heapq.heappush(self._ends, (ends_s, pin_id))

    def move(self, pin_id: int, state: PinState) -> None:
        """It is now pinned for another reason; nothing happens if it is gone."""
        pin = self._pins.get(pin_id)
        if pin is not None:
            self._count(pin.decode, pin.state, -pin.num_tokens)
            self._count(pin.decode, state, pin.num_tokens)
            pin.state = state

    def gone(self, pin_id: int) -> None:
        """D has freed it."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._count(pin.decode, pin.state, -pin.num_tokens)

    def restarted(self, decode: str, keep_engine_id: str | None) -> None:
        """D's earlier life is over, and all that it pinned; ``keep_engine_id`` is the new one."""
        doomed = [
            pin_id
            for pin_id, pin in self._pins.items()
            if pin.decode == decode
            and not (keep_engine_id and same_life(pin.engine_id, keep_engine_id))
        ]
        for pin_id in doomed:
            self.gone(pin_id)

    def expire(self, now_s: float) -> None:
        """Forget what D has freed by itself."""
        while self._ends and self._ends[0][0] <= now_s:
            self.gone(heapq.heappop(self._ends)[1])

    def tokens(self, decode: str, *states: PinState) -> int:
        """Tokens pinned on a decode node in these states (none given: in any)."""
        return sum(self._tokens.get((decode, state), 0) for state in states or PinState)

    def _count(self, decode: str, state: PinState, num_tokens: int) -> None:
        key = (decode, state)
        self._tokens[key] = self._tokens.get(key, 0) + num_tokens
