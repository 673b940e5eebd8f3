"""Errors in the shape of OpenAI's API, as vLLM gives them; each says what to do."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping

ERROR_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    417: "ExpectationFailedError",
    429: "RateLimitError",
    431: "RequestHeadersTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""Status to ``error.type``: every error that the router itself gives."""


class RefusedError(Exception):
    """A request that is refused before it becomes a turn; the message is for the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON of an error."""
    kind = ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error as a whole response."""
    return web.Response(
        status=status,
        body=error_body(status, message, param),
        content_type="application/json",
        headers=headers,
    )


def error_bytes(status: int, message: str, retry_after_s: int | None = None) -> bytes:
    """An error for a connection on which no request could be read; closes it."""
    body = error_body(status, message)
    retry = "" if retry_after_s is None else f"Retry-After: {retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{retry}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def error_event(message: str) -> bytes:
    """An error within a stream that has begun."""
    return b"data: " + error_body(502, message) + b"\n\n"
