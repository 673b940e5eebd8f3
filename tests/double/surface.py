"""The double's endpoints: vLLM's paths over one engine. Knows no sockets."""

from __future__ import annotations

import json
from typing import Any

from tests.double import answers, turns
from tests.double.answers import CHAT, COMPLETION
from tests.double.engine import Engine, Received, RefusedError
from tests.double.exchange import ORIGIN, Exchange, Whole
from tests.double.fabric import InvalidError
from tests.double.metrics import metrics_text
from tests.double.prompts import chat_prompt, completion_prompts, media_of

GETS = ("/v1/models", "/version", "/health", "/metrics")
POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/tokenize",
)


class Surface:
    """What an engine answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def get(self, path: str) -> Whole:
        """One of :data:`GETS`."""
        match path:
            case "/v1/models":
                return _json(self._models())
            case "/version":
                native = self.engine.native_stream_reference
                return _json({"version": "0.33.0" if native else "0.32.0"})
            case "/health":
                return Whole(200, "", "text/plain")
            case "/metrics":
                return Whole(200, metrics_text(self.engine), "text/plain")
        return Whole(404, '{"detail":"Not Found"}')

    async def post(
        self, path: str, data: bytes, headers: dict[str, str], exchange: Exchange
    ) -> Whole | None:
        """One of :data:`POSTS`; None if the answer was streamed or broken off."""
        ORIGIN.set(headers.get("x-request-id", ""))
        try:
            body = self._receive(path, data, headers)
            match path:
                case "/v1/chat/completions":
                    return await self._turn(path, body, headers, exchange, CHAT)
                case "/v1/completions":
                    return await self._turn(path, body, headers, exchange, COMPLETION)
                case "/v1/chat/completions/render":
                    return self._render_chat(body)
                case "/v1/completions/render":
                    return self._render_completion(body)
                case "/tokenize":
                    return self._tokenize(body)
        except RefusedError as refused:
            return _json(answers.error_body_of(refused), refused.status)
        return Whole(404, '{"detail":"Not Found"}')

    def _receive(self, path: str, data: bytes, headers: dict[str, str]) -> dict[str, Any]:
        try:
            body = json.loads(data or b"null")
        except ValueError as error:
            raise InvalidError(f"JSON decode error: {error}") from error
        if not isinstance(body, dict):
            raise InvalidError("Input should be a valid dictionary")
        self.engine.calls.append(Received(path, body, headers))
        return body

    async def _turn(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        exchange: Exchange,
        kind: str,
    ) -> Whole | None:
        self.engine.requests.append(Received(path, body, headers))
        # A copy: what was received stays as it came.
        return await turns.answer(self.engine, exchange, json.loads(json.dumps(body)), kind)

    def _render_chat(self, body: dict[str, Any]) -> Whole:
        self._for_render(body)
        hashes = media_of(body)
        features = {"mm_hashes": {"image": hashes}} if hashes else None
        ids = chat_prompt(self.engine, body, computed=False)
        return _json(self._rendered(body, ids, features))

    def _render_completion(self, body: dict[str, Any]) -> Whole:
        self._for_render(body)
        return _json([self._rendered(body, ids, None) for ids in completion_prompts(body)])

    def _for_render(self, body: dict[str, Any]) -> None:
        if not self.engine.renders:
            raise RefusedError(403, "Scale-out endpoints are disabled. Restart vllm serve with ...")
        turns.check_model(self.engine, body)

    def _rendered(
        self, body: dict[str, Any], ids: list[int], features: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "request_id": "double",
            "token_ids": ids,
            "features": features,
            "sampling_params": {"max_tokens": turns.max_tokens(self.engine, body)},
            "model": body.get("model"),
            "stream": bool(body.get("stream")),
            "cache_salt": body.get("cache_salt"),
        }

    def _tokenize(self, body: dict[str, Any]) -> Whole:
        turns.check_model(self.engine, body)
        ids = chat_prompt(self.engine, body) if "messages" in body else completion_prompts(body)[0]
        limit = self.engine.max_model_len
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    def _models(self) -> dict[str, Any]:
        engine = self.engine
        base = {"id": engine.model, "object": "model", "created": 0, "owned_by": "vllm"}
        served = [{**base, "root": engine.model, "max_model_len": engine.max_model_len}]
        served += [
            {**base, "id": name, "root": name, "parent": engine.model}
            for name in sorted(engine.adapters)
        ]
        return {"object": "list", "data": served}


def _json(value: Any, status: int = 200) -> Whole:
    return Whole(status, answers.compact(value))
