"""The endpoints that take turns: read the request, run the turn, pass the answer on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from kvloop.engines.client import EngineError
from kvloop.engines.sse import EventTooLargeError
from kvloop.gateway.errors import error_event, error_response
from kvloop.gateway.identity import conversation_of, engine_headers, request_id_of, tenant_of
from kvloop.turn.errors import EngineRefusedError, TurnFailedError
from kvloop.turn.request import Api, BadRequestError, TurnRequest, read_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvloop.turn.runner import Answer, TurnRunner

logger = logging.getLogger("kvloop.gateway")

REUSE_HEADER = "x-kvloop-reuse"
ROUTE_HEADER = "x-kvloop-route"
REQUEST_ID_HEADER = "x-request-id"


def turn_handler(
    api: Api, runner: TurnRunner, *, reuse: bool
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler of one API. ``reuse``: whether the router reuses KV at all."""

    async def handle(http: web.Request) -> web.StreamResponse:
        request_id = request_id_of(http.headers)
        headers = {REQUEST_ID_HEADER: request_id}
        try:
            request = await _read(api, http, request_id, reuse=reuse)
        except BadRequestError as error:
            return error_response(400, str(error), error.param, headers)
        try:
            async with runner.serve(request) as answer:
                return await _send(http, answer, headers)
        except EngineRefusedError as error:
            return web.Response(
                status=error.reply.status,
                body=error.reply.body,
                headers={**headers, "content-type": error.reply.content_type},
            )
        except TurnFailedError as error:
            if error.retry_after_s is not None:
                headers["retry-after"] = str(error.retry_after_s)
            return error_response(error.status, str(error), None, headers)
        except EngineError as error:
            # Before the answer's first byte; later ones are dealt with where they are sent.
            logger.warning("turn %s: %s", request_id, error)
            return error_response(502, "The decode node broke off.", None, headers)

    return handle


async def _read(api: Api, http: web.Request, request_id: str, *, reuse: bool) -> TurnRequest:
    wish = http.headers.get(REUSE_HEADER, "on").lower()
    if wish not in ("on", "off", "last"):
        raise BadRequestError(f"`{REUSE_HEADER}` must be on, off or last.", REUSE_HEADER)
    return read_request(
        api,
        await http.read(),
        request_id=request_id,
        tenant=tenant_of(http.headers),
        conversation=conversation_of(http.headers),
        reuse=reuse and wish != "off",
        is_last=wish == "last",
        engine_headers=engine_headers(http.headers, request_id),
    )


async def _send(
    http: web.Request, answer: Answer, headers: Mapping[str, str]
) -> web.StreamResponse:
    headers = {**headers, ROUTE_HEADER: answer.route, "content-type": answer.content_type}
    if answer.chunks is None:
        return web.Response(status=answer.status, body=answer.body, headers=headers)
    # Proxies in front of us (nginx) must not collect events.
    headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(http)
    try:
        async for chunk in answer.chunks:
            await response.write(chunk)
    except (EngineError, EventTooLargeError) as error:
        logger.warning("turn %s: %s", headers[REQUEST_ID_HEADER], error)
        await response.write(error_event("The decode node broke off while answering."))
    await response.write_eof()
    return response
