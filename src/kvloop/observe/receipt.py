"""Receipts: the route of a turn as it turned out.

Logged as one JSON line per turn by the logger ``kvloop.receipt``; no prompt text is in it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

logger = logging.getLogger("kvloop.receipt")


@dataclass(slots=True)
class Receipt:
    """Filled in while the turn runs; written once, at its end."""

    request_id: str
    api: str
    route: str = "none"
    """Kind of the route that served the turn."""
    why: str = ""
    prefill: str | None = None
    decode: str | None = None
    prompt_tokens: int | None = None
    claimed_tokens: int | None = None
    """Tokens that P asked decode nodes for, where it asks."""
    pulled_tokens: int = 0
    """Tokens that P read from D."""
    computed_tokens: int | None = None
    """Tokens that P computed; None where the engines did not say."""
    cold_retry: str | None = None
    """Why a pull was given up and done again cold."""
    filed: str | None = None
    """What became of D's reference: `filed`, or why not."""
    status: int = 0
    failure: str | None = None
    prefill_s: float | None = None
    decode_head_s: float | None = None

    @property
    def header(self) -> str:
        """Value of ``x-kvloop-route``: kind, pulled and computed tokens."""
        computed = "?" if self.computed_tokens is None else self.computed_tokens
        return f"{self.route}; pulled={self.pulled_tokens}; computed={computed}; why={self.why}"

    def write(self) -> None:
        """Log it."""
        logger.info("%s", msgspec.json.encode(self).decode())
