"""From request bodies to prompt ids."""

from __future__ import annotations

from typing import Any

from tests.double.engine import Engine, RefusedError
from tests.double.fabric import InvalidError
from tests.double.tokens import encode, media_hashes, render_chat


def chat_prompt(engine: Engine, body: dict[str, Any], *, computed: bool = True) -> list[int]:
    """The rendered messages, for the engine to compute or for ``/render`` to tell."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise InvalidError("messages: Field required", "messages")
    if not messages:
        raise RefusedError(400, "messages must not be empty", "messages")
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise InvalidError("messages: Input should be a valid message", "messages")
    return render_chat(
        messages,
        strips_reasoning=engine.strips_reasoning,
        tools=body.get("tools") if engine.renders_tools else None,
        add_generation_prompt=body.get("add_generation_prompt", True),
        stamped=computed and engine.renders_differently,
    )


def media_of(body: dict[str, Any]) -> list[str]:
    """Hashes of a chat's media; empty for completions."""
    messages = body.get("messages")
    return media_hashes(messages) if isinstance(messages, list) else []


def given_ids(params: Any, body: dict[str, Any]) -> list[int] | None:
    """Chat's ``kv_transfer_params.prompt_token_ids``, taken out of them; ignored with media."""
    ids = params.pop("prompt_token_ids", None) if isinstance(params, dict) else None
    if ids is None or media_of(body) or body.get("echo"):
        return None
    if not isinstance(ids, list) or not ids or any(type(one) is not int or one < 0 for one in ids):
        name = "kv_transfer_params.prompt_token_ids"
        raise RefusedError(400, f"`{name}` must be a non-empty list of integers.", name)
    return ids


def completion_prompts(body: dict[str, Any]) -> list[list[int]]:
    """One list of ids for each prompt."""
    prompt = body.get("prompt")
    if not prompt:
        raise RefusedError(400, "Either prompt or prompt_embeds must be provided and non-empty.")
    if isinstance(prompt, str):
        return [encode(prompt)]
    if isinstance(prompt[0], int):
        return [prompt]
    return [encode(one) if isinstance(one, str) else one for one in prompt]
