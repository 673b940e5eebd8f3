"""The HTTP surface byte by byte: what is ambiguous is refused, in the API's shape."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvloop.gateway.connection import WRITE_BUFFER_BYTES
from kvloop.turn.runner import Answer, TurnRunner
from tests.double.http import until
from tests.fuzz.raw import connected, exchange, replies, until_closed
from tests.router.stack import opening, stack

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: router\r\n"

MALFORMED = {
    "two lengths": CHAT + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "the same length twice": CHAT + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": CHAT + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": CHAT + b"Content-Length: +2\r\n\r\n{}",
    "a negative length": CHAT + b"Content-Length: -1\r\n\r\n{}",
    "a length beyond numbers": CHAT + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n{}",
    "length, then chunks": CHAT
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks, then length": CHAT
    + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "chunked twice": CHAT + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
    "an unknown coding": CHAT + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding below chunks": CHAT + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": CHAT + b"Transfer-Encoding: identity\r\n\r\n{}",
    "a blank before the colon": CHAT + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nHost: a\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no size": CHAT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: other\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nHost: router\n\n",
    "a folded header": GET + b"A: b\r\n c\r\n\r\n",
    "a zero byte": GET + b"A: b\0c\r\n\r\n",
    "a port beyond ports": b"GET http://router:99999999/health HTTP/1.1\r\nHost: router\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: router\r\n\r\n",
    "a method nobody knows": b"HACK /health HTTP/1.1\r\nHost: router\r\n\r\n",
    "too many headers": GET + b"A: b\r\n" * 500 + b"\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_not_http_is_refused_and_what_follows_is_not_looked_at(name: str) -> None:
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: router\r\n\r\n"
    async with stack() as s:
        (reply,) = await exchange(s.url, MALFORMED[name] + smuggled)
        assert reply.error["code"] == 400
        assert s.prefill.requests == s.decode.requests == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: router\r\n\r\n", 431),
        (GET + b"A: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere:443\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n", 404),
        (b"GET http://elsewhere HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n", 404),
        (b"GET //elsewhere/health HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n", 404),
        (b"GET /v1/../health HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n", 404),
        (CHAT + b"Expect: wonders\r\nConnection: close\r\n\r\n", 417),
        (CHAT + b"Connection: close\r\nContent-Length: 4\r\n\r\n\xff\xfe\x00{", 400),
    ],
)
async def test_odd_requests_get_an_error_in_the_apis_shape(data: bytes, status: int) -> None:
    async with stack() as s:
        (reply,) = await exchange(s.url, data)
        assert reply.error["code"] == status


@pytest.mark.parametrize(
    "data",
    [
        b"GET http://elsewhere/health HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a b/c:\\\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
    ],
)
async def test_hosts_and_absolute_targets_mean_nothing_to_the_router(data: bytes) -> None:
    async with stack() as s:
        (reply,) = await exchange(s.url, data)
        assert (reply.status, reply.body) == (200, b'{"status":"ok"}')


async def test_a_compressed_body_is_refused_before_it_is_unpacked() -> None:
    async with stack() as s:
        bomb = gzip.compress(bytes(50_000_000))
        head = f"Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
        (reply,) = await exchange(s.url, CHAT + head + bomb)
        assert reply.error["code"] == 415


async def test_a_body_announced_too_large_is_refused_without_reading_it() -> None:
    async with stack(settings={"max_body_bytes": 1000}) as s:
        async with connected(s.url) as (reader, writer):
            writer.write(CHAT + b"Content-Length: 1001\r\n\r\n")
            (reply,) = replies(await until_closed(reader))
        assert reply.error["code"] == 413
        assert reply.headers["connection"] == "close"


async def test_a_body_that_grows_too_large_is_cut_off() -> None:
    async with stack(settings={"max_body_bytes": 1000}) as s:
        chunks = b"100\r\n" + b"x" * 256 + b"\r\n"
        async with connected(s.url) as (reader, writer):
            writer.write(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + chunks * 5)
            (reply,) = replies(await until_closed(reader))
        assert reply.error["code"] == 413


async def test_who_is_not_let_in_is_not_told_to_send_the_body() -> None:
    body = json.dumps({"model": "double", "messages": opening(), "max_tokens": 2}).encode()
    asking = CHAT + f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n".encode()
    async with stack(settings={"max_body_bytes": len(body)}) as s:
        async with connected(s.url) as (reader, writer):
            writer.write(asking + b"\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        s.router.admission.draining = True
        async with connected(s.url) as (reader, writer):
            writer.write(asking + b"\r\n")
            (reply,) = replies(await until_closed(reader))
        assert reply.error["code"] == 503


async def test_a_body_that_nobody_has_read_is_no_next_request() -> None:
    inner = GET + b"\r\n"
    head = f"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: {len(inner)}\r\n\r\n"
    async with stack() as s:
        (reply,) = await exchange(s.url, head.encode() + inner)
    assert reply.error["code"] == 404
    assert reply.headers["connection"] == "close"


async def _drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, more often than any timeout."""
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("sent", "dripped"),
    [
        (b"", GET * 100),
        (CHAT, b"A: b\r\n" * 100),
        (CHAT + b"Content-Length: 9000\r\n\r\n", b"{" * 900),
    ],
    ids=["request line", "headers", "body"],
)
async def test_a_request_that_comes_byte_by_byte_is_given_up(sent: bytes, dripped: bytes) -> None:
    async with stack(settings={"request_timeout_s": 0.3}) as s:
        async with connected(s.url) as (reader, writer):
            writer.write(sent)
            drip = asyncio.create_task(_drip(writer, dripped))
            (reply,) = replies(await until_closed(reader))
            drip.cancel()
        assert reply.error["code"] == 408


async def test_the_second_request_on_a_connection_has_a_time_limit_too() -> None:
    async with stack(settings={"request_timeout_s": 0.3}) as s:
        async with connected(s.url) as (reader, writer):
            writer.write(GET + b"\r\n")
            first = await reader.readuntil(b'"ok"}')
            writer.write(GET)
            ok, late = replies(first + await until_closed(reader))
        assert (ok.status, late.status) == (200, 408)


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with stack(settings={"request_timeout_s": 0.3}) as s, connected(s.url) as (reader, _):
        assert await until_closed(reader) == b""


async def test_a_long_turn_is_no_slow_request() -> None:
    async with stack(settings={"request_timeout_s": 0.2}) as s:
        s.prefill.hold = asyncio.Event()
        turn = asyncio.create_task(s.chat(opening()))
        await until(lambda: len(s.prefill.requests) == 1)
        late = asyncio.get_running_loop().time() + 0.5
        await until(lambda: asyncio.get_running_loop().time() > late)
        s.prefill.hold.set()
        assert (await turn).status == 200


async def test_more_connections_than_may_be_are_turned_away_and_room_comes_back() -> None:
    async with stack(settings={"max_connections": 3}) as s:
        await s.http.close()
        await until(lambda: not s.router.limits.open)
        async with connected(s.url), connected(s.url), connected(s.url):
            await until(lambda: len(s.router.limits.open) == 3)
            async with connected(s.url) as (reader, _):
                (reply,) = replies(await until_closed(reader))
            assert reply.error["code"] == 503
            assert reply.headers["retry-after"]
        await until(lambda: not s.router.limits.open)
        (reply,) = await exchange(s.url, GET + b"Connection: close\r\n\r\n")
        assert reply.status == 200


def streamed_turn(max_tokens: int) -> bytes:
    body = {"model": "double", "messages": opening(), "stream": True, "ignore_eos": True}
    data = json.dumps({**body, "max_tokens": max_tokens}).encode()
    return CHAT + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


async def test_a_client_that_stops_reading_is_cut_off_and_its_turn_ends() -> None:
    async with stack(settings={"client_stall_timeout_s": 0.3}) as s:
        s.decode.cut_stream = lambda data: [data + b": " + b"x" * 100_000 + b"\n\n"]
        async with connected(s.url, receive_buffer=4096) as (_, writer):
            writer.write(streamed_turn(max_tokens=400))
            await until(lambda: len(s.router.admission) == 1)
            await until(lambda: len(s.router.admission) == 0)
        await until(lambda: s.decode.disconnects == 1)
        metrics = s.router.services.metrics.render()
        assert b'kvloop_refused_requests_total{why="stalled_client"} 1.0' in metrics


async def test_no_more_is_taken_from_an_engine_than_a_client_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + b"x" * 992 + b"\n\n"
            await asyncio.sleep(0)

    @asynccontextmanager
    async def serve(*_: object) -> AsyncIterator[Answer]:
        yield Answer(200, "text/event-stream", "recompute", chunks=events())

    monkeypatch.setattr(TurnRunner, "serve", serve)
    async with stack(settings={"client_stall_timeout_s": 0.3}) as s:
        waiting: list[int] = [0]

        def cut_off() -> bool:
            transports = [c.transport for c in s.router.limits.open if c.transport is not None]
            waiting.extend(transport.get_write_buffer_size() for transport in transports)
            return b"stalled_client" in s.router.services.metrics.render()

        async with connected(s.url, receive_buffer=4096) as (_, writer):
            writer.write(streamed_turn(max_tokens=1))
            await until(cut_off)
    assert 10_000 < max(waiting) < WRITE_BUFFER_BYTES + 2000


async def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    async with stack(settings={"client_stall_timeout_s": 0.3}) as s:
        s.decode.cut_stream = lambda data: [data + b": " + b"x" * 2_000 + b"\n\n"]
        async with connected(s.url, receive_buffer=4096) as (reader, writer):
            writer.write(streamed_turn(max_tokens=60))
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(2048)
                await asyncio.sleep(0.02)  # being slow is what is tested
        assert b"[DONE]" in received
