"""How engines are called: three kinds of call, three kinds of failure.

:class:`EngineClient` is the contract; :class:`HttpEngineClient` the one that runs.

Nothing of a request's meaning may be known here. Closing a stream early closes its connection,
which is how vLLM learns that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

# vLLM's server drops idle connections after 5 s (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`), and looks at the
# clock before it looks for data: a server that stood still for the rest of its 5 s drops one that
# has just brought a request. A decode leg cannot be sent twice, so the rest must be long.
_KEEP_ALIVE_S = 1.0
_CONNECT_TRIES = 2  # see `_send`
_READ_BUFFER_BYTES = 16 * 1024
_RECEIVE_BUFFER_BYTES = 32 * 1024
_JSON = {"content-type": "application/json"}


class EngineError(Exception):
    """An engine did not give an HTTP answer; the message names it and says what happened."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(f"engine {url}: {what}")
        self.url = url
        self.what = what


class EngineUnreachableError(EngineError):
    """No connection: the engine has not seen the request."""


class EngineBrokenError(EngineError):
    """The connection broke after the request was sent: the engine may have begun."""


class EngineTimeoutError(EngineError):
    """No answer in the time allowed; the connection was closed, so the engine aborts."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    content_type: str
    body: bytes


class StreamReply(Protocol):
    """An answer whose body is still coming."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def content_type(self) -> str:
        """The whole header."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineBrokenError or EngineTimeoutError."""

    async def whole(self) -> Reply:
        """The body at its end. Raises like :meth:`chunks`."""


class EngineClient(Protocol):
    """Calls engines; an async context manager for as long as its connections live."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def get(self, url: str, path: str, *, timeout_s: float) -> Reply:
        """GET a small answer. Raises EngineError."""

    async def post(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> Reply:
        """POST JSON and wait for the whole answer, ``timeout_s`` at most. Raises EngineError."""

    def stream(
        self,
        url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        silence_timeout_s: float,
    ) -> AbstractAsyncContextManager[StreamReply]:
        """POST JSON and read the answer as it comes. Raises EngineError.

        ``silence_timeout_s`` is the longest wait for the answer's head and between two chunks.
        """


class HttpStreamReply:
    """See :class:`StreamReply`."""

    def __init__(self, url: str, response: aiohttp.ClientResponse) -> None:
        self._url = url
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/octet-stream")

    async def chunks(self) -> AsyncIterator[bytes]:
        """See :meth:`StreamReply.chunks`."""
        content = self._response.content
        with _engine_errors(self._url):
            while chunk := await content.readany():
                yield chunk

    async def whole(self) -> Reply:
        """See :meth:`StreamReply.whole`."""
        with _engine_errors(self._url):
            return Reply(self.status, self.content_type, await self._response.read())


class HttpEngineClient:
    """Keeps connections to engines; see :class:`EngineClient`."""

    def __init__(self, connect_timeout_s: float, api_key: str = "") -> None:
        """``connect_timeout_s``: an engine that does not accept within this is unreachable.

        It is asked twice, for half of the time each: nothing has been sent by then, and a lost
        packet, or a router that stood still for a moment, is no reason to give an engine up.

        ``api_key``: sent with every call that brings no credentials of its own.
        """
        self._connect_timeout_s = connect_timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, read_bufsize=_READ_BUFFER_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, url: str, path: str, *, timeout_s: float) -> Reply:
        """See :meth:`EngineClient.get`."""
        async with self._send("GET", url, path, None, {}, timeout_s, None) as stream:
            return await stream.whole()

    async def post(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> Reply:
        """See :meth:`EngineClient.post`."""
        async with self._send("POST", url, path, body, headers, timeout_s, None) as stream:
            return await stream.whole()

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        silence_timeout_s: float,
    ) -> AsyncGenerator[HttpStreamReply]:
        """See :meth:`EngineClient.stream`."""
        async with self._send("POST", url, path, body, headers, None, silence_timeout_s) as stream:
            yield stream

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        total_s: float | None,
        silence_s: float | None,
    ) -> AsyncGenerator[HttpStreamReply]:
        session = self._session
        if session is None:
            raise RuntimeError("HttpEngineClient is used outside of its `async with`")
        timeout = aiohttp.ClientTimeout(
            total=total_s,
            sock_connect=self._connect_timeout_s / _CONNECT_TRIES,
            sock_read=silence_s,
        )
        request_headers = {**headers, **_JSON} if body is not None else dict(headers)

        async def request() -> aiohttp.ClientResponse:
            return await session.request(
                method,
                url + path,
                data=body,
                headers=request_headers,
                timeout=timeout,
                allow_redirects=False,
            )

        with _engine_errors(url):
            try:
                response = await request()
            except aiohttp.ConnectionTimeoutError:
                response = await request()
        async with response:
            yield HttpStreamReply(url, response)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One whose kernel buffer is small: what a slow client does not read waits on the engine."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return made


class _engine_errors:  # noqa: N801 - used like a statement
    """Translate the HTTP library's failures into ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
            raise EngineUnreachableError(self._url, f"cannot connect ({error})") from error
        if isinstance(error, asyncio.TimeoutError):
            raise EngineTimeoutError(self._url, "did not answer in time") from error
        if isinstance(error, aiohttp.ClientError | ConnectionError):
            detail = str(error) or type(error).__name__
            raise EngineBrokenError(self._url, f"connection broke ({detail})") from error
