"""Message chains: the keys under which a conversation is found again without any client change.

One key per message boundary: the hash of the identity and of every message up to there. A key
finds, it proves nothing; so equal spellings of a message are made equal generously, and what a
chat template may drop (reasoning) is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloop.proof.fingerprint import Prefixes

ChainKey: TypeAlias = bytes
"""16 bytes: BLAKE2b of everything up to a boundary."""

_KEY_BYTES: Final = 16
_FINEST_STRIDE_UNITS: Final = 4
_encoder = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal before one prompt's KV may serve another, besides its tokens."""

    tenant: str
    api: str
    model: str
    cache_salt: str | None = None
    template: Any = None
    """The request's own chat template, where it sends one."""
    tools: Any = None

    def digest(self) -> ChainKey:
        """The seed of this identity's chains."""
        fields = (self.tenant, self.api, self.model, self.cache_salt, self.template, self.tools)
        return _hash(b"", _encoder.encode(fields))


def message_chain(identity: Identity, messages: Sequence[dict[str, Any]]) -> list[ChainKey]:
    """Keys of the boundaries after each message, shortest first.

    Boundaries before the first user message are left out: a system prompt alone is shared by
    conversations that have nothing else in common, and their references are not each other's.
    """
    key = identity.digest()
    keys = []
    seen_user = not any(message.get("role") == "user" for message in messages)
    for message in messages:
        key = _hash(key, _encoder.encode(canonical_message(message)))
        seen_user = seen_user or message.get("role") == "user"
        if seen_user:
            keys.append(key)
    return keys


def token_chain(identity: Identity, prefixes: Prefixes) -> list[ChainKey]:
    """Keys for a prompt without messages: boundaries at token positions, shortest first.

    The distance between boundaries grows with the position (a sixteenth of it, in powers of two),
    so a long prompt has few keys, and any two prompts that share a long prefix share one.
    """
    seed = identity.digest()
    keys = []
    for units in range(_FINEST_STRIDE_UNITS, len(prefixes) + 1, _FINEST_STRIDE_UNITS):
        stride = max(_FINEST_STRIDE_UNITS, 1 << max(0, units.bit_length() - 5))
        if units % stride == 0:
            keys.append(_hash(seed, prefixes[units - 1].tobytes() + units.to_bytes(4, "little")))
    return keys


def canonical_message(message: dict[str, Any]) -> tuple[Any, ...]:
    """A message without what spelling, defaults and reasoning make of it."""
    return (
        message.get("role"),
        _canonical_content(message.get("content")),
        [_canonical_tool_call(call) for call in message.get("tool_calls") or ()],
        message.get("tool_call_id"),
    )


def _canonical_content(content: Any) -> Any:
    """A string, one text part, a list of text parts and null all become a list of texts."""
    if content is None or content == "":
        return []
    if not isinstance(content, list):
        return [content]
    return [
        part["text"]
        if isinstance(part, dict) and part.get("type") == "text" and "text" in part
        else part
        for part in content
    ]


def _canonical_tool_call(call: Any) -> Any:
    """Name and arguments; the arguments as the value they spell, if they spell one."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model may write anything; then the text itself is the key.
        with contextlib.suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(arguments)
    return (function.get("name"), arguments)


def _hash(previous: bytes, data: bytes) -> ChainKey:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES, key=previous).digest()
