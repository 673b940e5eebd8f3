"""Reading streamed answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def streamed_text(raw: bytes) -> str:
    """The text of a stream of chat or completion chunks."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in _choices(raw)
    )


def streamed_token_ids(raw: bytes) -> list[int]:
    """The generated ids, where the client asked for them (`return_token_ids`)."""
    return [token for choice in _choices(raw) for token in choice.get("token_ids") or ()]


def _choices(raw: bytes) -> Iterator[dict[str, Any]]:
    for event in raw.decode().split("\n\n"):
        if event.startswith("data: {"):
            yield from json.loads(event[6:]).get("choices", [])
