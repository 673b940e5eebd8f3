"""When a reference ends, on our clock.

D says when it will free the blocks (``remote_blocks_expiry_time``) on its own monotonic clock,
which is no use to us by itself. But every reference of one engine is a sample of the distance
between the clocks, too large by however long the answer took to reach us; the smallest sample so
far is the best. A slow client or a busy router then does not make us believe in blocks that D has
freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DeadlineClock:
    """Turns D's expiry times into deadlines; one per router, samples kept per engine id."""

    ttl_s: float
    """How long D pins a finished request (`decoder_kv_blocks_ttl`; vLLM's default is 480)."""
    margin_s: float
    """Time a claimed reference needs to be read: P's queue, and the 5 s before the expiry in which
    P refuses (`_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`)."""
    _offsets_s: dict[str, float] = field(default_factory=dict)

    def deadline_s(self, engine_id: str, expiry_s: object, now_s: float) -> float:
        """The last moment, on the clock of ``now_s``, at which the reference may be claimed.

        ``expiry_s``: D's ``remote_blocks_expiry_time``; anything but a number means that D does
        not say, and the TTL counts from now.
        """
        latest_s = now_s + self.ttl_s
        if isinstance(expiry_s, int | float) and not isinstance(expiry_s, bool):
            offset_s = min(latest_s - expiry_s, self._offsets_s.get(engine_id, float("inf")))
            self._offsets_s[engine_id] = offset_s
            latest_s = min(latest_s, expiry_s + offset_s)
        return latest_s - self.margin_s

    def forget(self, engine_id: str) -> None:
        """Drop the samples of an engine that is gone."""
        self._offsets_s.pop(engine_id, None)
