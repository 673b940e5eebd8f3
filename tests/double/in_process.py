"""Doubles called without sockets: the router's engine client over surfaces in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Self

from kvloop.engines.client import (
    EngineBrokenError,
    EngineTimeoutError,
    EngineUnreachableError,
    Reply,
)
from tests.double.engine import Engine
from tests.double.exchange import Whole
from tests.double.surface import Surface

_END = None
_EVENTS = "text/event-stream; charset=utf-8"


class _Pipe:
    """One call as both ends see it; see :class:`tests.double.exchange.Exchange`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue(64)
        self.head: asyncio.Future[Whole | None] = asyncio.get_running_loop().create_future()
        self.broken = asyncio.Event()
        self.work: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        if not self.head.done():
            self.head.set_result(None)

    async def write(self, data: bytes) -> None:
        if self.broken.is_set():
            raise ConnectionResetError
        await self.pieces.put(data)  # a full queue holds the engine back

    async def end(self) -> None:
        await self.pieces.put(_END)

    def break_off(self) -> None:
        self.broken.set()
        if not self.head.done():
            self.head.set_exception(EngineBrokenError(self.url, "connection broke"))
            self.head.exception()  # whoever still waits is told; nobody is no fault

    async def next(self) -> bytes | None:
        """The next piece; None at the end."""
        if not self.pieces.empty():
            return self.pieces.get_nowait()
        if self.broken.is_set():
            raise EngineBrokenError(self.url, "connection broke")
        piece = asyncio.ensure_future(self.pieces.get())
        broken = asyncio.ensure_future(self.broken.wait())
        try:
            await asyncio.wait({piece, broken}, return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                return piece.result()
            raise EngineBrokenError(self.url, "connection broke")
        finally:
            piece.cancel()
            broken.cancel()


class _Stream:
    """See :class:`kvloop.engines.client.StreamReply`."""

    def __init__(self, pipe: _Pipe, whole: Whole | None, silence_s: float) -> None:
        self._pipe, self._whole, self._silence_s = pipe, whole, silence_s
        self.status = 200 if whole is None else whole.status
        self.content_type = _EVENTS if whole is None else whole.content_type

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._whole is not None:
            yield self._whole.text.encode()
            return
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    piece = await self._pipe.next()
            except TimeoutError as error:
                raise EngineTimeoutError(self._pipe.url, "did not answer in time") from error
            if piece is _END:
                return
            yield piece

    async def whole(self) -> Reply:
        body = b"".join([chunk async for chunk in self.chunks()])
        return Reply(self.status, self.content_type, body)


class InProcessClient:
    """See :class:`kvloop.engines.client.EngineClient`. Engines are added with :meth:`serve`."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        """``delay_s``: how long the next request takes to reach its engine."""
        self._delay_s = delay_s
        self._surfaces: dict[str, Surface] = {}
        self._listening: set[str] = set()
        self._pipes: dict[str, dict[_Pipe, None]] = {}
        self.faults: list[Exception] = []
        """What went wrong in a double itself."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for url in self._surfaces:
            self._break_all(url)

    def serve(self, url: str, engine: Engine) -> None:
        """Let ``engine`` answer at ``url``."""
        self._surfaces[url] = Surface(engine)
        self._pipes[url] = {}
        self._listening.add(url)

    def kill(self, url: str) -> None:
        """Its process is gone; see :func:`tests.double.http.kill`."""
        self._surfaces[url].engine.dead = True
        self._listening.discard(url)
        self._break_all(url)

    def revive(self, url: str) -> None:
        """Another process at the same address."""
        self._surfaces[url].engine.restart()
        self._listening.add(url)

    async def get(self, url: str, path: str, *, timeout_s: float) -> Reply:
        await self._reach(url, timeout_s)
        whole = self._surfaces[url].get(path)
        return Reply(whole.status, whole.content_type, whole.text.encode())

    async def post(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float
    ) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                call = self.stream(url, path, body, headers, silence_timeout_s=timeout_s + 1)
                async with call as reply:
                    return await reply.whole()
        except TimeoutError as error:
            raise EngineTimeoutError(url, "did not answer in time") from error

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        silence_timeout_s: float,
    ) -> AsyncIterator[_Stream]:
        await self._reach(url, silence_timeout_s)
        pipe = _Pipe(url)
        self._pipes[url][pipe] = None
        pipe.work = asyncio.create_task(self._answer(url, path, body, dict(headers), pipe))
        try:
            try:
                async with asyncio.timeout(silence_timeout_s):
                    head = await asyncio.shield(pipe.head)
            except TimeoutError as error:
                raise EngineTimeoutError(url, "did not answer in time") from error
            yield _Stream(pipe, head, silence_timeout_s)
        finally:
            self._pipes[url].pop(pipe, None)
            pipe.work.cancel()  # an engine notices readers that leave

    async def _reach(self, url: str, timeout_s: float) -> None:
        """On the way there. Raises EngineUnreachableError."""
        delay_s = self._delay_s()
        if delay_s > 0:
            await asyncio.sleep(min(delay_s, timeout_s))
        if url not in self._listening:
            raise EngineUnreachableError(url, "cannot connect")
        if self._surfaces[url].engine.dead:
            raise EngineBrokenError(url, "connection broke")

    async def _answer(
        self, url: str, path: str, body: bytes, headers: dict[str, str], pipe: _Pipe
    ) -> None:
        try:
            whole = await self._surfaces[url].post(path, body, headers, pipe)
        except ConnectionError:
            return
        except Exception as error:  # noqa: BLE001 - a double's own fault must not look like vLLM's
            self.faults.append(error)
            pipe.break_off()
            return
        if whole is not None and not pipe.head.done():
            pipe.head.set_result(whole)
        elif not pipe.head.done():
            pipe.break_off()

    def _break_all(self, url: str) -> None:
        for pipe in [*self._pipes[url]]:
            pipe.break_off()
            if pipe.work is not None:
                pipe.work.cancel()
