"""A toy tokenizer and ChatML template: one token a character, special tokens above."""

from __future__ import annotations

from typing import Any, Final

IM_START: Final = 50_001
IM_END: Final = 50_002
_SPECIAL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>"}


def encode(text: str) -> list[int]:
    """One id a character."""
    return [ord(character) for character in text]


def decode(token_ids: list[int]) -> str:
    """The text of plain tokens; special ones are not shown."""
    return "".join(chr(token) for token in token_ids if token not in _SPECIAL)


def render_chat(messages: list[dict[str, Any]], *, strips_reasoning: bool = False) -> list[int]:
    """ChatML ids; ``strips_reasoning`` drops what assistants thought, as Qwen3's template does."""
    ids: list[int] = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content)
        if strips_reasoning and message["role"] == "assistant":
            content = content.rpartition("</think>")[2]
        ids += [IM_START, *encode(f"{message['role']}\n{content}"), IM_END, ord("\n")]
    return [*ids, IM_START, *encode("assistant\n")]
