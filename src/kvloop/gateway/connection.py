"""One client's connection: the limits that the HTTP library does not set.

The library's own limits (line, field, number of headers, what may be pipelined) are chosen here,
too. What it lacks: a time limit for a request's head, one for a client that does not read, a bound
on connections, and errors in our shape for what is not HTTP. No request is understood here.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from kvloop.gateway.errors import error_bytes, error_response
from kvloop.gateway.traces import shape_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvloop.gateway.counters import Counters

logger = logging.getLogger("kvloop.gateway")

MAX_LINE_BYTES: Final = 8190
MAX_FIELD_BYTES: Final = 8190
MAX_HEADERS: Final = 100
KEEP_ALIVE_S: Final = 75.0
"""Longer than load balancers keep theirs (60 s), so that they close first."""
LINGER_S: Final = 1.0
"""How long a refused body is read and dropped, so that the client sees why."""
WRITE_BUFFER_BYTES: Final = 32 * 1024
"""What may wait in this process for one client that reads slowly."""
UNSENT_BYTES: Final = 16 * 1024
"""What may wait for it in the kernel, beyond what is on the network."""


@dataclass(slots=True)
class Limits:
    """Of one listener, and how many connections it has. Times in seconds."""

    max_connections: int
    request_timeout_s: float
    client_stall_timeout_s: float
    counters: Counters
    open: set[Connection] = field(default_factory=set)


class Connection(web.RequestHandler):
    """The library's protocol, bounded."""

    def __init__(self, server: web.Server, limits: Limits) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._limits = limits
        self._wire: asyncio.Transport | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._has_read = False
        self._serving = False
        self._is_last = False
        self._unread = 0
        self._has_drained = False

    # --- the connection's life ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or turn the client away where there are too many."""
        limits = self._limits
        transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class
        if len(limits.open) >= limits.max_connections:
            limits.counters.refused.labels(why="connections").inc()
            transport.write(error_bytes(503, "Too many connections. Try again later.", 1))
            transport.close()
            return
        self._wire = transport
        limits.open.add(self)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _bound_kernel_buffer(transport)
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        self._limits.open.discard(self)
        self._cancel_timers()
        super().connection_lost(exc)
        self._wire = None

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._stall_timer = None

    # --- a request's head must come in time --------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        self._has_read = True
        if self._head_timer is None and not self._serving and not self._is_last:
            self._expect_head()
        super().data_received(data)

    @contextmanager
    def serving(self) -> Generator[None]:
        """While a request is being answered: its head is complete."""
        self._serving = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        try:
            yield
        finally:
            self._serving = self._has_read = False

    def _expect_head(self) -> None:
        timeout_s = self._limits.request_timeout_s
        self._head_timer = asyncio.get_running_loop().call_later(timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._wire is not None and self._has_read and not self._wire.is_closing():
            self._limits.counters.refused.labels(why="slow_head").inc()
            self._wire.write(error_bytes(408, "The request's headers did not come in time."))
        self.force_close()

    # --- a client must read ------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._has_drained = True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest; what the client has not read then must still go out."""
        finished = await super().finish_response(request, resp, start_time)
        self._is_last = not resp.keep_alive
        if self._wire is not None and self._wire.get_write_buffer_size():
            self._watch_reading()
        return finished

    def _watch_reading(self) -> None:
        if self._stall_timer is None and self._wire is not None:
            self._unread, self._has_drained = _unread_bytes(self._wire), False
            self._stall_timer = asyncio.get_running_loop().call_later(
                self._limits.client_stall_timeout_s, self._check_reading
            )

    def _check_reading(self) -> None:
        """Has anything been read since? Then look again later, as long as something waits."""
        self._stall_timer = None
        wire = self._wire
        if wire is None or not wire.get_write_buffer_size():
            return
        if self._has_drained or _unread_bytes(wire) < self._unread:
            self._watch_reading()
            return
        self._limits.counters.refused.labels(why="stalled_client").inc()
        logger.info("a client reads nothing: its connection is closed")
        wire.abort()

    # --- errors ------------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - may quote the request
    ) -> web.StreamResponse:
        """What could not be read as HTTP, or escaped everything else. Closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionResetError("the answer has begun")
        if status == 400:
            status = 431 if isinstance(exc, LineTooLong) else 400
            self._limits.counters.refused.labels(why="malformed_http").inc()
            logger.debug("not HTTP as it should be: %s", type(exc).__name__)
            text = "This is not a valid HTTP request."
            if status == 431:
                text = "The request line or a header is too long."
        else:
            self.log_exception("request failed", exc_info=exc)
            text = "The router failed on this request."
        response = error_response(status, text)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Without the exception's own words: they may quote a prompt or a key."""
        self._limits.counters.unhandled.inc()
        logger.error("%s\n%s", args[0], shape_of(kw.get("exc_info")))


def _bound_kernel_buffer(transport: asyncio.Transport) -> None:
    """Let the kernel take no more than it can send; else a slow reader gets megabytes of it."""
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What waits for the client: in this process, and in the kernel until it is acknowledged."""
    sock = transport.get_extra_info("socket")
    queued: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    return transport.get_write_buffer_size() + queued
