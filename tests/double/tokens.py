"""A toy tokenizer and ChatML template: one token a character, special tokens above Unicode.

Generated text may hold *pair* tokens (two letters in one), which :func:`encode` never makes: text
tokenised again is then not what was generated.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

IM_START: Final = 0x11_0001
IM_END: Final = 0x11_0002
MEDIA_PAD: Final = 0x11_0003
SPECIAL: Final = {IM_START: "<|im_start|>", IM_END: "<|im_end|>", MEDIA_PAD: "<|media_pad|>"}
_PAIRS: Final = 0x12_0000
_MEDIA_TOKENS: Final = 4


def encode(text: str) -> list[int]:
    """One id a character."""
    return [ord(character) for character in text]


def decode(token_ids: list[int]) -> str:
    """The text of plain tokens; special ones are not shown."""
    return "".join(_text_of(token) for token in token_ids if token not in SPECIAL)


def pair(first: int, second: int) -> int:
    """The one token of two letters (0-25 each)."""
    return _PAIRS + 26 * first + second


def _text_of(token: int) -> str:
    if token < _PAIRS:
        return chr(token)
    first, second = divmod(token - _PAIRS, 26)
    return chr(ord("a") + first) + chr(ord("a") + second)


def render_chat(
    messages: list[dict[str, Any]],
    *,
    strips_reasoning: bool = False,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    stamped: bool = False,
) -> list[int]:
    """ChatML ids.

    ``strips_reasoning`` drops what assistants thought before the last user message, as Qwen3's
    template does. ``tools`` are listed in front, and before them, if ``stamped``, how many messages
    there are: a template's own words, other ones each turn, as a date is.
    """
    ids: list[int] = _message("system", encode(f"{len(messages)} messages")) if stamped else []
    if tools:
        listed = "\n".join(json.dumps(tool, sort_keys=True) for tool in tools)
        ids += _message("system", encode(f"<tools>\n{listed}\n</tools>"))
    roles = [message["role"] for message in messages]
    last_user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else -1
    for number, message in enumerate(messages):
        strips = strips_reasoning and number < last_user
        ids += _message(message["role"], _content(message, strips_reasoning=strips))
    return [*ids, IM_START, *encode("assistant\n")] if add_generation_prompt else ids


def media_hashes(messages: list[dict[str, Any]]) -> list[str]:
    """One hash for each part that is not text."""
    return [
        hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("type", "text") != "text"
    ]


def _message(role: str, content: list[int]) -> list[int]:
    return [IM_START, *encode(f"{role}\n"), *content, IM_END, ord("\n")]


def _content(message: dict[str, Any], *, strips_reasoning: bool) -> list[int]:
    content = message.get("content") or ""
    if isinstance(content, list):
        return _parts(content)
    if message["role"] == "tool":
        return encode(f"<tool_response>{content}</tool_response>")
    if message["role"] != "assistant":
        return encode(content)
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        content = f"<think>{thought}</think>{content}"
    if strips_reasoning:
        content = content.rpartition("</think>")[2]
    for call in message.get("tool_calls") or []:
        function = call["function"]
        called = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        content += f"<tool_call>{json.dumps(called)}</tool_call>"
    return encode(content)


def _parts(parts: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for number, part in enumerate(parts):
        is_text = part.get("type", "text") == "text"
        ids += encode("\n") if number else []
        ids += encode(part.get("text", "")) if is_text else [MEDIA_PAD] * _MEDIA_TOKENS
    return ids
