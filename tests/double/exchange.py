"""One request and its answer, whatever carries them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple, Protocol

ORIGIN: ContextVar[str] = ContextVar("origin", default="")
"""The client's request id, as the router passes it on: who a block was computed for."""


class Whole(NamedTuple):
    """An answer that is not streamed."""

    status: int
    text: str
    content_type: str = "application/json"


class Exchange(Protocol):
    """How an engine streams or breaks off. A reader who leaves cancels the engine's task."""

    async def begin(self) -> None:
        """Send the head of a stream of events."""

    async def write(self, data: bytes) -> None:
        """Send a piece of it."""

    async def end(self) -> None:
        """The stream is over."""

    def break_off(self) -> None:
        """Close the connection."""
