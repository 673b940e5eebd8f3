"""Bodies and stream events as vLLM 0.32 writes them. Pure: a :class:`Choice` in, JSON out."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.double.engine import Sequence
from tests.double.fabric import InvalidError, RefusedError
from tests.double.parsing import Parsed, parse
from tests.double.tokens import decode, encode

CHAT, COMPLETION = "chat.completion", "text_completion"
DONE = "data: [DONE]\n\n"
FINGERPRINT = "vllm-double"
"""On the last chunk of a stream that has choices or usage."""
_IDS = {CHAT: "chatcmpl-double", COMPLETION: "cmpl-double"}
_EXTRAS = ("refusal", "annotations", "audio", "function_call", "reasoning")
_NO_EXTRAS = dict.fromkeys(_EXTRAS)
_NO_DETAILS = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
_NO_PROMPT_DETAILS = dict.fromkeys(("created_cache_tokens", "multimodal_tokens"))


class Delta(NamedTuple):
    """What one token adds to an answer."""

    token: int
    text: str
    parsed: dict[str, Any] | None


class Choice:
    """One answer as the API sees it: text, stop strings, parsed parts."""

    def __init__(self, index: int, sequence: Sequence, body: dict[str, Any]) -> None:
        self.index, self.sequence = index, sequence
        stops = body.get("stop") or []
        self.stops: list[str] = [stops] if isinstance(stops, str) else stops
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._sent = 0
        self._held_back = max((len(stop) - 1 for stop in self.stops), default=0)
        self._parses = sequence.engine.parses_output
        self.parsed = Parsed("", "", [])

    def advance(self) -> Delta:
        """One more token. A stop string ends the request on the API side, as an abort."""
        token = self.sequence.step()
        self.text += decode([token])
        if self.sequence.finish_reason:
            self.finish_reason = self.sequence.finish_reason
            self.stop_reason = self.sequence.stop_reason
        for stop in self.stops:
            at = self.text.find(stop, self._sent)
            if at >= 0:
                self.text = self.text[:at]
                self.finish_reason, self.stop_reason = "stop", stop
                if not self.sequence.finish_reason:  # by its last token it has ended by itself
                    self.sequence.abort()
                break
        text = self._unsent()
        delta = self._parse() if self._parses else None
        if self.parsed.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return Delta(token, text, delta)

    @property
    def params(self) -> dict[str, Any] | None:
        return None if self.sequence.engine.drop_reference else self.sequence.params

    def _unsent(self) -> str:
        end = len(self.text) - (0 if self.finish_reason else self._held_back)
        text = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return text

    def _parse(self) -> dict[str, Any] | None:
        before = self.parsed
        self.parsed = parse(self.text[: self._sent], finished=self.finish_reason is not None)
        return self.parsed.since(before)


def usage(choices: list[Choice], kind: str) -> dict[str, Any]:
    prompts = {id(choice.sequence.prompt): choice.sequence for choice in choices}.values()
    num_prompt = sum(len(sequence.prompt) for sequence in prompts)
    num_output = sum(len(choice.sequence.output) for choice in choices)
    said: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }
    if choices[0].sequence.engine.reports_cached_tokens:
        cached = choices[0].sequence.cached_tokens
        details = {"cached_tokens": cached}
        if kind == CHAT:
            details["created_cache_tokens"] = num_prompt - cached
        said["prompt_tokens_details"] = details
    return said


def whole(body: dict[str, Any], choices: list[Choice], kind: str) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    wants_ids = bool(body.get("return_token_ids"))
    answer: dict[str, Any] = {
        "id": _IDS[kind],
        "object": kind,
        "created": 0,
        "model": body.get("model"),
        "choices": [_whole_choice(body, choice, kind) for choice in choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": _whole_usage(choices, kind),
    }
    if kind == CHAT:
        answer["prompt_logprobs"] = None
        answer["prompt_token_ids"] = choices[0].sequence.prompt if wants_ids else None
        answer["prompt_text"] = None
    answer["kv_transfer_params"] = choices[0].params
    return {**answer, "ec_transfer_params": None, "metrics": None}


def _whole_usage(choices: list[Choice], kind: str) -> dict[str, Any]:
    """As in a stream, and what is empty is said."""
    said = {**_NO_DETAILS, **usage(choices, kind)}
    if said["prompt_tokens_details"]:
        said["prompt_tokens_details"] = {**_NO_PROMPT_DETAILS, **said["prompt_tokens_details"]}
    return said


def _whole_choice(body: dict[str, Any], choice: Choice, kind: str) -> dict[str, Any]:
    sequence, wants_ids = choice.sequence, bool(body.get("return_token_ids"))
    said: dict[str, Any] = {
        "index": choice.index,
        "logprobs": _logprobs(body, sequence.output, kind),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": sequence.output if wants_ids else None,
        "routed_experts": None,
    }
    if kind == CHAT:
        said["message"] = {"role": "assistant", "content": choice.text, **_NO_EXTRAS}
        if sequence.engine.parses_output:
            said["message"] |= choice.parsed.message()
    else:
        said["text"] = choice.text
        said["prompt_token_ids"] = sequence.prompt if wants_ids else None
        said["prompt_logprobs"] = None
    return said


def event(kind: str, body: dict[str, Any], choices: list[dict[str, Any]], **more: Any) -> str:
    """One chunk of a stream as one server-sent event."""
    name = f"{kind}.chunk" if kind == CHAT else kind
    head = {"id": _IDS[kind], "object": name, "created": 0, "model": body.get("model")}
    return f"data: {compact({**head, 'choices': choices, **more})}\n\n"


def opening_event(body: dict[str, Any], choice: Choice) -> str:
    """Chat only: the role, and the prompt's ids for those who asked."""
    said = {
        "index": choice.index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    ids = choice.sequence.prompt if body.get("return_token_ids") else None
    return event(CHAT, body, [said], prompt_token_ids=ids, prompt_text=None)


def token_event(
    body: dict[str, Any], choice: Choice, delta: Delta, kind: str, *, native: bool
) -> str | None:
    """One token; None where a parser keeps it back and nobody asked for ids."""
    wants_ids, ended = bool(body.get("return_token_ids")), choice.finish_reason is not None
    said: dict[str, Any] = {"index": choice.index}
    if kind == CHAT:
        parses = choice.sequence.engine.parses_output
        if parses and delta.parsed is None and not ended and not wants_ids:
            return None
        said["delta"] = (delta.parsed or {}) if parses else {"content": delta.text}
    else:
        said["text"] = delta.text
    said["logprobs"] = _logprobs(body, [delta.token], kind)
    said["finish_reason"] = choice.finish_reason
    if ended or kind != CHAT:
        said["stop_reason"] = choice.stop_reason
    if kind != CHAT:
        first = len(choice.sequence.output) == 1 and wants_ids
        said["prompt_token_ids"] = choice.sequence.prompt if first else None
    said["token_ids"] = [delta.token] if wants_ids else None
    more: dict[str, Any] = {"kv_transfer_params": choice.params} if native and ended else {}
    if ended and not (body.get("stream_options") or {}).get("include_usage"):
        more["system_fingerprint"] = FINGERPRINT
    return event(kind, body, [said], **more)


def usage_event(kind: str, body: dict[str, Any], choices: list[Choice]) -> str:
    """The last chunk, for those who asked for it."""
    said = {"usage": usage(choices, kind), "system_fingerprint": FINGERPRINT}
    return event(kind, body, [], **said)


def reference_event(choice: Choice | None, *, native: bool) -> str:
    """What kvloop's plugin adds before the end; natively the reference is in a chunk already."""
    said: dict[str, Any] = {"object": "kvloop.stream_reference"}
    if not native:
        said["kv_transfer_params"] = None if choice is None else choice.params
    said["token_ids"] = [] if choice is None else choice.sequence.output
    return f"data: {compact(said)}\n\n"


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kinds = {403: "PermissionDeniedError", 404: "NotFoundError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_body_of(refused: RefusedError) -> dict[str, Any]:
    body = error_body(refused.status, str(refused), refused.param)
    if isinstance(refused, InvalidError):
        body["error"]["type"] = "Bad Request"
    return body


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _logprobs(body: dict[str, Any], token_ids: list[int], kind: str) -> dict[str, Any] | None:
    """A greedy model is sure of itself."""
    if kind == CHAT:
        if not body.get("logprobs"):
            return None
        texts = [decode([token]) for token in token_ids]
        return {"content": [_chat_logprob(text, body) for text in texts]}
    if body.get("logprobs") is None:
        return None
    texts = [decode([token]) for token in token_ids]
    offsets = [len(encode("".join(texts[:number]))) for number in range(len(texts))]
    return {
        "text_offset": offsets,
        "token_logprobs": [0.0] * len(texts),
        "tokens": texts,
        "top_logprobs": [{text: 0.0} for text in texts],
    }


def _chat_logprob(text: str, body: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"token": text, "logprob": 0.0, "bytes": list(text.encode())}
    top = [dict(said)] if body.get("top_logprobs") else []
    return {**said, "top_logprobs": top}
