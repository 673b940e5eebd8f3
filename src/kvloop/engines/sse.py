"""Server-sent events on their way through: whole events out, bytes untouched.

A splitter, not a parser: it finds the ends of events and cuts nothing else. What is inside an event
is looked at only when a byte search says that it may be for us.
"""

from __future__ import annotations

from typing import Final

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024
"""An unfinished event larger than this is not an event stream."""


_BLANK_LINES: Final = (b"\n\n", b"\n\r\n", b"\r\r")
"""What ends an event, whichever line ends its server likes."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class EventTooLargeError(Exception):
    """The engine sends something that never becomes an event."""


class EventSplitter:
    """Holds back only the unfinished event at the end of what was fed."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The whole events that are complete now, as one piece of the stream's own bytes.

        Raises EventTooLargeError.
        """
        if not self._rest and data.endswith(b"\n\n"):
            return data  # how vLLM sends: whole events in every chunk
        data = self._rest + data
        end = _end_of_last_event(data)
        self._rest = data[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return data[:end]

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return rest


def split_events(events: bytes) -> list[bytes]:
    """Whole events, each with the blank line that ends it; joined they are ``events`` again."""
    pieces = []
    start = 0
    while start < len(events):
        ends = [
            position + len(mark)
            for mark in _BLANK_LINES
            if (position := events.find(mark, start)) >= 0
        ]
        end = min(ends, default=len(events))
        pieces.append(events[start:end])
        start = end
    return pieces


def event_data(event: bytes) -> bytes:
    """The payload of an event's ``data`` lines, joined as the standard says; empty if none."""
    lines = []
    for line in event.removeprefix(_BYTE_ORDER_MARK).splitlines():
        if line.startswith(b"data:"):
            payload = line[5:]
            lines.append(payload[1:] if payload.startswith(b" ") else payload)
    return b"\n".join(lines)


def _end_of_last_event(data: bytes) -> int:
    return max(
        position + len(mark) if (position := data.rfind(mark)) >= 0 else 0 for mark in _BLANK_LINES
    )
