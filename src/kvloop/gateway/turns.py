"""The endpoints that take turns: let the request in, run the turn, pass the answer on."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from kvloop.engines.client import EngineError
from kvloop.engines.sse import EventTooLargeError
from kvloop.gateway.errors import RefusedError, error_event, error_response
from kvloop.gateway.front import REQUEST_ID, REQUEST_ID_HEADER
from kvloop.gateway.identity import conversation_of, engine_headers
from kvloop.turn.errors import EngineRefusedError, TurnFailedError
from kvloop.turn.request import Api, BadRequestError, TurnRequest, read_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvloop.config import Settings
    from kvloop.engines.client import Reply
    from kvloop.gateway.admission import Admission
    from kvloop.gateway.counters import Counters
    from kvloop.gateway.identity import Caller, Callers
    from kvloop.turn.runner import Answer, TurnRunner

logger = logging.getLogger("kvloop.gateway")

REUSE_HEADER: Final = "x-kvloop-reuse"
REUSE_WISHES: Final = ("on", "off", "last")
ROUTE_HEADER: Final = "x-kvloop-route"


class Turns:
    """Handlers of the APIs that take turns."""

    def __init__(
        self,
        runner: TurnRunner,
        callers: Callers,
        admission: Admission,
        counters: Counters,
        settings: Settings,
    ) -> None:
        self._runner = runner
        self._callers = callers
        self._admission = admission
        self._counters = counters
        self._settings = settings

    def handler(self, api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of one API."""

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                caller = self._callers.identify(http.headers)
                self._check_length(http)
                with self._admission.turn(caller.tenant):
                    return await self._turn(api, http, caller)
            except RefusedError as error:
                self._counters.refused.labels(why=str(error.status)).inc()
                raise

        return handle

    async def _turn(self, api: Api, http: web.Request, caller: Caller) -> web.StreamResponse:
        request_id: str = http[REQUEST_ID]
        headers = {REQUEST_ID_HEADER: request_id}
        try:
            request = await self._read(api, http, caller, request_id)
        except BadRequestError as error:
            return error_response(400, str(error), error.param, headers)
        try:
            async with self._runner.serve(request) as answer:
                return await _send(http, answer, headers)
        except EngineRefusedError as error:
            return _engine_error(error.reply, headers)
        except TurnFailedError as error:
            if error.retry_after_s is not None:
                headers["retry-after"] = str(error.retry_after_s)
            return error_response(error.status, str(error), None, headers)
        except EngineError as error:
            # Before the answer's first byte; later ones are dealt with where they are sent.
            logger.warning("turn %s: %s", request_id, error)
            return error_response(502, "The decode node broke off.", None, headers)

    def _check_length(self, http: web.Request) -> None:
        """Raises RefusedError for a body that is announced too large; not a byte of it is read."""
        limit = self._settings.max_body_bytes
        if http.content_length is not None and http.content_length > limit:
            text = f"The request body is too large: {limit} bytes at most."
            raise RefusedError(413, text, {"connection": "close"})

    async def _read(
        self, api: Api, http: web.Request, caller: Caller, request_id: str
    ) -> TurnRequest:
        wish = http.headers.get(REUSE_HEADER, "on").lower()
        if wish not in REUSE_WISHES:
            raise BadRequestError(f"`{REUSE_HEADER}` must be on, off or last.", REUSE_HEADER)
        return read_request(
            api,
            await self._body(http),
            request_id=request_id,
            tenant=caller.tenant,
            conversation=conversation_of(http.headers),
            reuse=self._settings.reuse and wish != "off",
            is_last=wish == "last",
            engine_headers=engine_headers(http.headers, request_id, caller.authorization),
        )

    async def _body(self, http: web.Request) -> bytes:
        """Raises RefusedError when it does not come in time."""
        if hdrs.EXPECT in http.headers and http.version >= (1, 1):
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http.writer.output_size = 0  # the answer itself has not begun
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                return await http.read()
        except TimeoutError as error:
            text = "The request body did not come in time."
            raise RefusedError(408, text, {"connection": "close"}) from error


def _engine_error(reply: Reply, headers: Mapping[str, str]) -> web.Response:
    """An engine's error as the engine put it, where that is an answer of this API."""
    if reply.status >= 400 and reply.content_type.startswith("application/json"):
        headers = {**headers, "content-type": reply.content_type}
        return web.Response(status=reply.status, body=reply.body, headers=headers)
    status = reply.status if reply.status >= 400 else 502
    text = f"An engine answered with status {reply.status} and no reason that can be passed on."
    return error_response(status, text, None, headers)


async def wait_for_body(_: web.Request) -> None:
    """Says nothing to ``Expect: 100-continue`` yet: the client may send once it is let in."""


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
    protocol, writer = http.protocol, http.writer
    try:
        async for chunk in answer.chunks:
            await response.write(chunk)
            if protocol.writing_paused:
                # No more is taken from the engine than this client reads.
                await writer.drain()
    except (EngineError, EventTooLargeError) as error:
        logger.warning("turn %s: %s", headers[REQUEST_ID_HEADER], error)
        await response.write(error_event("The decode node broke off while answering."))
    await response.write_eof()
    return response
