"""D's stream on its way to the client: every byte as it came, but for the KV reference.

The reference comes in an event of its own (kvloop's plugin, taken out whole) or as a field of the
event with ``finish_reason`` (vLLM from 0.33, the field is taken out). Byte searches find both; an
event without them is never parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvloop.engines.sse import EventSplitter, event_data, split_events
from kvloop.wire import KV_PARAMS, STREAM_REFERENCE_OBJECT

# Inside a JSON string the closing quote would be escaped, so these match keys and values only.
_NATIVE_FIELD: Final = f'"{KV_PARAMS}":'.encode()
_PLUGIN_EVENT: Final = f'{STREAM_REFERENCE_OBJECT}"'.encode()


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """What D said at the end of its answer, for the router alone."""

    params: dict[str, Any] | None
    """D's reference; None where D retains nothing."""
    token_ids: list[int] | None
    """Generated ids; None where nobody told us."""
    by_plugin: bool = False


NOTHING_SAID: Final = AnswerEnd(params=None, token_ids=None)


class AnswerStream:
    """Feeds on D's bytes, gives the client's, and keeps the reference in :attr:`end`."""

    __slots__ = ("_splitter", "end")

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self.end = NOTHING_SAID

    def feed(self, data: bytes) -> bytes:
        """The bytes that the client may have now. Raises EventTooLargeError."""
        events = self._splitter.feed(data)
        if events.find(_PLUGIN_EVENT) < 0 and events.find(_NATIVE_FIELD) < 0:
            return events
        return b"".join(self._without_reference(event) for event in split_events(events))

    def finish(self) -> bytes:
        """What is left for the client when D's stream has ended."""
        rest = self._splitter.finish()
        return self._without_reference(rest) if rest else rest

    def _without_reference(self, event: bytes) -> bytes:
        if event.find(_PLUGIN_EVENT) < 0 and event.find(_NATIVE_FIELD) < 0:
            return event
        try:
            message = msgspec.json.decode(event_data(event))
        except msgspec.DecodeError:
            return event  # not JSON, so no field of it can be ours
        if not isinstance(message, dict):
            return event
        if message.get("object") == STREAM_REFERENCE_OBJECT:
            params = message.get(KV_PARAMS, self.end.params)
            self.end = AnswerEnd(params, message.get("token_ids"), by_plugin=True)
            return b""
        if KV_PARAMS not in message:
            return event
        self.end = AnswerEnd(message.pop(KV_PARAMS), self.end.token_ids)
        return b"data: " + msgspec.json.encode(message) + b"\n\n"


def take_from_body(body: bytes, *, keep_token_ids: bool) -> tuple[bytes, AnswerEnd]:
    """A non-streamed answer for the client, and what it said to the router.

    ``keep_token_ids``: the client itself asked for token ids. A body that is not a JSON object is
    passed on as it is.
    """
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body, NOTHING_SAID
    if not isinstance(answer, dict):
        return body, NOTHING_SAID
    params = answer.pop(KV_PARAMS, None)
    choices = answer.get("choices")
    token_ids = None
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        token_ids = choices[0].get("token_ids")
    if not keep_token_ids:
        answer.pop("prompt_token_ids", None)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
    return msgspec.json.encode(answer), AnswerEnd(params, token_ids)
