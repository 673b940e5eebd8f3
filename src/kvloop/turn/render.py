"""The prompt's token ids, from an engine: rendered once, used for the proof and by both legs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvloop.engines.client import EngineError
from kvloop.proof.fingerprint import MAX_TOKEN_ID, are_token_ids
from kvloop.turn.bodies import PromptIds, render_body
from kvloop.turn.errors import EngineRefusedError
from kvloop.turn.plan import ProvenPrompt, boundaries_of
from kvloop.turn.request import Api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloop.engines.fleet import Engine
    from kvloop.turn.request import TurnRequest
    from kvloop.turn.services import Services

logger = logging.getLogger("kvloop.turn")


class _Rendered(msgspec.Struct):
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]


async def render(
    request: TurnRequest, renderers: Sequence[Engine], turn_number: int, services: Services
) -> ProvenPrompt | None:
    """Token ids and what follows from them; None where no engine can tell us.

    Raises EngineRefusedError when the engine finds the request itself wrong.
    """
    ids = _ids_in_the_request(request)
    if ids is None:
        if not renderers:
            return None
        renderer = renderers[turn_number % len(renderers)]
        ids = await _ask(request, renderer, services)
    if not ids:
        return None
    prefixes = services.fingerprinter.prefixes(ids)
    return ProvenPrompt(PromptIds(ids), prefixes, boundaries_of(request, prefixes))


def _ids_in_the_request(request: TurnRequest) -> list[int] | None:
    """Completions may send ids themselves; they are the prompt unless it is to be truncated."""
    prompt = request.body.get("prompt")
    if request.api is not Api.COMPLETIONS or request.body.get("truncate_prompt_tokens"):
        return None
    if not isinstance(prompt, list) or not prompt:
        return None
    return prompt if are_token_ids(prompt) else None


async def _ask(request: TurnRequest, renderer: Engine, services: Services) -> list[int] | None:
    path = request.api.render_path
    started_s = services.clock()
    try:
        reply = await services.client.post(
            renderer.url,
            path,
            render_body(request),
            request.engine_headers,
            timeout_s=services.timeouts.render_s,
        )
    except EngineError as error:
        services.metrics.engine_errors.labels(leg="render", kind=type(error).__name__).inc()
        logger.warning("prompt not rendered, the turn goes cold: %s", error)
        return None
    services.metrics.leg_seconds.labels(leg="render").observe(services.clock() - started_s)
    if 400 <= reply.status < 500 and reply.status not in (403, 404, 405):
        raise EngineRefusedError(reply)
    if reply.status != 200:
        services.metrics.engine_errors.labels(leg="render", kind=str(reply.status)).inc()
        return None
    try:
        if request.api is Api.CHAT:
            return msgspec.json.decode(reply.body, type=_Rendered).token_ids
        (rendered,) = msgspec.json.decode(reply.body, type=list[_Rendered])
    except (msgspec.DecodeError, ValueError):
        services.metrics.engine_errors.labels(leg="render", kind="malformed").inc()
        logger.warning("engine %s gave no token ids on %s", renderer.url, path)
        return None
    return rendered.token_ids
