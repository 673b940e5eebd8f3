"""Around every request, whatever it asks for: what no endpoint wants, and the shape of errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from kvloop.gateway.connection import Connection
from kvloop.gateway.errors import RefusedError, error_response
from kvloop.gateway.identity import request_id_of
from kvloop.gateway.traces import shape_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvloop.gateway.counters import Counters

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger("kvloop.gateway")

REQUEST_ID: Final = web.RequestKey("kvloop_request_id", str)
"""Key of the request's id, in the request."""
REQUEST_ID_HEADER: Final = "x-request-id"


def front(handler: Handler, counters: Counters, known: str) -> Handler:
    """``handler`` with every error in the API's shape. ``known``: the paths there are, in words."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        request_id = request_id_of(request.headers)
        request[REQUEST_ID] = request_id
        connection = request.protocol
        if not isinstance(connection, Connection):
            raise TypeError("requests come by way of our own connections")
        with connection.serving():
            response = await _answer(handler, request, counters, known)
        if not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, request_id)
            if request.can_read_body and not request.content.at_eof():
                response.force_close()  # what is left of the body is no next request
        return response

    return answer


async def _answer(
    handler: Handler, request: web.BaseRequest, counters: Counters, known: str
) -> web.StreamResponse:
    try:
        _check(request)
        return await handler(request)
    except RefusedError as error:
        return _refusal(error)
    except web.HTTPException as error:
        return _library_refusal(request, error, known)
    except web.RequestPayloadError:
        return _closing(error_response(400, "The request body is not what its headers announce."))
    except ConnectionError:
        raise  # the client is gone
    except Exception as error:  # the outermost edge
        counters.unhandled.inc()
        request_id = request[REQUEST_ID]
        logger.error("request %s failed in the router:\n%s", request_id, shape_of(error))
        if request.writer.output_size > 0:
            raise ConnectionResetError("the answer has begun") from error
        text = f"The router failed on this request; its log has {request_id}."
        return error_response(500, text)


def _check(request: web.BaseRequest) -> None:
    """Raises RefusedError for what is served on no path.

    Two lengths, two hosts, blanks before a colon and the like are refused by the library's parser.
    """
    headers = request.headers
    if request.method == hdrs.METH_CONNECT:
        raise RefusedError(405, "This is not a proxy.", {"connection": "close"})
    coding = headers.get(hdrs.TRANSFER_ENCODING)
    if coding is not None and (coding.lower() != "chunked" or request.version < (1, 1)):
        # Whoever stands in front of us may have understood it otherwise.
        text = "The only transfer encoding is `chunked`, of HTTP/1.1."
        raise RefusedError(400, text, {"connection": "close"})
    if headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        text = "Compressed requests are not accepted. Send the body as it is."
        raise RefusedError(415, text, {"accept-encoding": "identity", "connection": "close"})
    if headers.get(hdrs.EXPECT, "100-continue").lower() != "100-continue":
        raise RefusedError(417, "The only expectation that is understood is 100-continue.")


def _refusal(error: RefusedError) -> web.Response:
    response = error_response(error.status, str(error), None, error.headers)
    return _closing(response) if error.headers.get("connection") == "close" else response


def _closing(response: web.Response) -> web.Response:
    response.force_close()
    return response


def _library_refusal(
    request: web.BaseRequest, error: web.HTTPException, known: str
) -> web.Response:
    if isinstance(error, web.HTTPNotFound):
        return error_response(404, f"There is no {request.path} here. There are: {known}.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        text = f"{request.path} takes {allowed}, not {request.method}."
        return error_response(405, text, None, {"allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return _closing(error_response(413, "The request body is too large."))
    return error_response(error.status, error.reason)
