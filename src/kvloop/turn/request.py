"""A turn's request, read from an API's body: what the loop must know of it, and the rest as it is.

Pure. Validates only what the loop itself relies on; what else is wrong with a request, the engine
says better.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from kvloop.proof.chain import Identity
from kvloop.wire import KV_PARAMS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Api(Enum):
    """The APIs that take turns; the value is the path on the router and on the engines."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"

    @property
    def label(self) -> str:
        """Short name for metrics and receipts."""
        return "chat" if self is Api.CHAT else "completions"

    @property
    def render_path(self) -> str:
        """Where an engine turns such a request into token ids."""
        return f"{self.value}/render"


class BadRequestError(Exception):
    """The request cannot be understood; ``param`` names the field where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn, before anything was decided."""

    api: Api
    body: dict[str, Any]
    """The client's fields, less those that no client may set."""
    request_id: str
    tenant: str = ""
    conversation: str | None = None
    """The client's own id of the conversation: a hint, no proof."""
    reuse: bool = True
    is_last: bool = False
    """The client says that no turn will follow: D need not keep anything."""
    engine_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """The model or adapter asked for."""
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def streamed(self) -> bool:
        """Whether the client wants events."""
        return bool(self.body.get("stream"))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat's messages; empty for completions."""
        messages: list[dict[str, Any]] = self.body.get("messages") or []
        return messages

    @property
    def identity(self) -> Identity:
        """What must be equal for reuse, besides tokens."""
        return Identity(
            tenant=self.tenant,
            api=self.api.label,
            model=self.model or "",
            cache_salt=self.body.get("cache_salt"),
            template=self.body.get("chat_template"),
            tools=self.body.get("tools"),
        )

    @property
    def without_prefill(self) -> str | None:
        """Why P and D cannot share this request's prompt, if they cannot: D then computes alone.

        P's blocks are for one reader: several sequences would race for them (vLLM #43509). Prompt
        log-probabilities exist only where the prompt is computed.
        """
        body = self.body
        if (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1:
            return "several_sequences"
        if body.get("use_beam_search"):
            return "beam_search"
        if body.get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        if self.api is Api.COMPLETIONS:
            if body.get("prompt_embeds") is not None:
                return "prompt_embeds"
            if body.get("echo"):
                return "echo"
            if _num_prompts(body.get("prompt")) != 1:
                return "several_prompts"
        return None

    @property
    def without_reuse(self) -> str | None:
        """Why this turn neither uses nor leaves a reference, if so; P and D work as always."""
        if not self.reuse:
            return "off"
        if self.api is Api.CHAT:
            if self.body.get("echo"):
                return "echo"
            if any(_has_media(message.get("content")) for message in self.messages):
                return "media"
        return None


def read_request(
    api: Api,
    data: bytes,
    *,
    request_id: str,
    tenant: str = "",
    conversation: str | None = None,
    reuse: bool = True,
    is_last: bool = False,
    engine_headers: Mapping[str, str] | None = None,
) -> TurnRequest:
    """Read a client's body. Raises BadRequestError."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise BadRequestError("The body is nested too deeply.") from error
    if not isinstance(body, dict):
        raise BadRequestError("The body must be a JSON object.")
    _drop_engine_fields(body)
    _check(api, body)
    own_id = body.get("conversation_id") or body.get("prompt_cache_key")
    return TurnRequest(
        api=api,
        body=body,
        request_id=request_id,
        tenant=tenant,
        conversation=conversation or (own_id if isinstance(own_id, str) else None),
        reuse=reuse,
        is_last=is_last,
        engine_headers=engine_headers or {},
    )


def _drop_engine_fields(body: dict[str, Any]) -> None:
    """Take out what only the router may say to an engine.

    ``vllm_xargs`` end up where vLLM looks for ``kv_transfer_params``: a string there kills the
    engine.
    """
    body.pop(KV_PARAMS, None)
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        extra.pop(KV_PARAMS, None)


def _check(api: Api, body: dict[str, Any]) -> None:
    if "model" in body and not isinstance(body["model"], str | None):
        raise BadRequestError("`model` must be a string.", "model")
    for number in ("n", "best_of"):
        value = body.get(number)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise BadRequestError(f"`{number}` must be an integer.", number)
    if api is Api.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequestError(
                "`messages` must be a list with at least one message.", "messages"
            )
        if not all(isinstance(message, dict) for message in messages):
            raise BadRequestError("Every message must be an object.", "messages")
    elif "prompt" not in body and body.get("prompt_embeds") is None:
        raise BadRequestError("`prompt` is missing.", "prompt")


def _num_prompts(prompt: Any) -> int:
    """A string or a list of ids is one prompt; otherwise a list of prompts."""
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return 1


def _has_media(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") != "text" for part in content
    )
