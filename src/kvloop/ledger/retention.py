"""In which order a decode node's references are given up when there are too many.

Those of conversations that were never continued go before those that were: most requests have no
next turn, and one that had several will likely have another. Within each, the oldest first. (The
two classes of segmented LRU, Karedla et al., "Caching strategies to improve disk system
performance", IEEE Computer 27(3), 1994; nothing is demoted, since every pin has a deadline.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator


RELIEVED_USAGE: Final = 0.8
RELIEF_SHARE: Final = 0.1
"""Of D's capacity, at each look at it (`probe_interval_s`)."""


class RetentionOrder:
    """One decode node's live references."""

    __slots__ = ("_continued", "_first_turns")

    def __init__(self) -> None:
        # Dicts keep the order of filing.
        self._first_turns: dict[int, int] = {}
        self._continued: dict[int, int] = {}

    def add(self, reference_id: int, num_tokens: int, *, continued: bool) -> None:
        """``continued``: the reference follows an earlier one of its conversation."""
        (self._continued if continued else self._first_turns)[reference_id] = num_tokens

    def discard(self, reference_id: int) -> None:
        """It was claimed, dropped or has lapsed."""
        if self._first_turns.pop(reference_id, None) is None:
            self._continued.pop(reference_id, None)

    def ids(self) -> list[int]:
        """All of them."""
        return [*self._first_turns, *self._continued]

    def victims(self, num_tokens: int) -> list[int]:
        """Who must go so that ``num_tokens`` are freed; all, if that is not enough."""
        chosen: list[int] = []
        for reference_id, tokens in self._least_likely_first():
            if num_tokens <= 0:
                break
            chosen.append(reference_id)
            num_tokens -= tokens
        return chosen

    def _least_likely_first(self) -> Iterator[tuple[int, int]]:
        yield from self._first_turns.items()
        yield from self._continued.items()


def tokens_over(
    *, capacity: int, budget_share: float, pinned: int, usage: float, waiting: int, longest: int
) -> int:
    """Tokens that D should pin less.

    ``capacity``: D's KV cache in tokens; ``pinned``: tokens that it pins for us and that nobody is
    giving back yet; ``usage``: share of its KV blocks in use; ``waiting``: requests that wait on D;
    ``longest``: tokens of the longest sequence that it takes.

    Above the budget, the excess. And while requests wait and one of the longest would find no room,
    a step of :data:`RELIEF_SHARE`, or as much as brings a nearly full cache down to
    :data:`RELIEVED_USAGE`: they must not wait for deadlines (known failure 12). With room for the
    longest, requests wait for something else, and pins would be given up for nothing.
    """
    over = pinned - int(capacity * budget_share)
    if waiting > 0 and (1 - usage) * capacity < longest:
        over = max(over, math.ceil(max(usage - RELIEVED_USAGE, RELIEF_SHARE) * capacity))
    return max(0, min(over, pinned))
