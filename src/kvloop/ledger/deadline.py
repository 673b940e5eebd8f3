"""When a reference ends, on our clock.

D says when it will free the blocks (``remote_blocks_expiry_time``) on its own monotonic clock,
which is no use to us by itself. But every reference of one engine is a sample of the distance
between the clocks, too large by however long the answer took to reach us; the smallest sample of
late is the best. A slow client or a busy router then does not make us believe in blocks that D has
freed. Of late only: clocks drift apart (50 millionths are 4 s a day), and the smallest sample of a
month ago would let every reference end before it began.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

WINDOW_S: Final = 600.0
"""Samples count for at least one and at most two of these."""
_MAX_ENGINES: Final = 1024


@dataclass(slots=True)
class _Offset:
    """Smallest distance between two clocks over this window and the one before."""

    since_s: float
    current_s: float
    before_s: float = float("inf")

    def add(self, offset_s: float, now_s: float) -> float:
        """The smallest of late, this sample included."""
        if now_s - self.since_s >= WINDOW_S:
            is_next = now_s - self.since_s < 2 * WINDOW_S
            self.before_s = self.current_s if is_next else float("inf")
            self.since_s, self.current_s = now_s, offset_s
        self.current_s = min(self.current_s, offset_s)
        return min(self.current_s, self.before_s)


@dataclass(slots=True)
class DeadlineClock:
    """Turns D's expiry times into deadlines; one per router, samples kept per engine id."""

    ttl_s: float
    """How long D pins a finished request (`decoder_kv_blocks_ttl`; vLLM's default is 480)."""
    margin_s: float
    """Time a claimed reference needs to be read: P's queue, and the 5 s before the expiry in which
    P refuses (`_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`)."""
    _offsets: OrderedDict[str, _Offset] = field(default_factory=OrderedDict)

    def deadline_s(self, engine_id: str, expiry_s: object, now_s: float) -> float:
        """The last moment, on the clock of ``now_s``, at which the reference may be claimed.

        ``expiry_s``: D's ``remote_blocks_expiry_time``; anything but a number means that D does
        not say, and the TTL counts from now.
        """
        latest_s = now_s + self.ttl_s
        if isinstance(expiry_s, int | float) and not isinstance(expiry_s, bool):
            latest_s = min(latest_s, expiry_s + self._offset_s(engine_id, latest_s, expiry_s))
        return latest_s - self.margin_s

    def _offset_s(self, engine_id: str, latest_s: float, expiry_s: float) -> float:
        now_s, sample_s = latest_s - self.ttl_s, latest_s - expiry_s
        offset = self._offsets.setdefault(engine_id, _Offset(now_s, sample_s))
        self._offsets.move_to_end(engine_id)
        if len(self._offsets) > _MAX_ENGINES:  # lives of engines that are long over
            self._offsets.popitem(last=False)
        return offset.add(sample_s, now_s)
