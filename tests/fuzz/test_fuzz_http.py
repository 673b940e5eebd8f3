"""Bytes to the router's socket, from random to nearly right.

Whatever they are, each connection gets answers in our shape or none, and is closed in time; the
router is well after it.
"""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import Served
from tests.fuzz.raw import connected, replies, until_closed

LAST = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
"""Ends every connection that is still understood."""

method = st.sampled_from(
    [b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"get", b"", b"\0"]
)
target = st.one_of(
    st.sampled_from(
        [
            b"/v1/chat/completions",
            b"/v1/completions",
            b"/v1/models",
            b"/health",
            b"/openapi.json",
            b"*",
            b"http://a/health",
            b"//a/health",
            b"a:443",
            b"/%00%ff/../health?%zz#x",
        ]
    ),
    st.binary(max_size=30),
)
version = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"HTTP/0.9", b"HTTP/1.", b""])
name = st.one_of(
    st.sampled_from(
        [
            b"Host",
            b"Content-Length",
            b"Transfer-Encoding",
            b"Content-Encoding",
            b"Content-Type",
            b"Connection",
            b"Expect",
            b"Upgrade",
            b"Authorization",
            b"X-Api-Key",
            b"X-Request-ID",
            b"X-Session-ID",
            b"x-kvloop-reuse",
            b"traceparent",
        ]
    ),
    st.binary(max_size=12),
)
value = st.one_of(
    st.sampled_from(
        [
            b"a",
            b"0",
            b"2",
            b"5000",
            b"99999999999999999999",
            b"-1",
            b"chunked",
            b"gzip, chunked",
            b"identity",
            b"gzip",
            b"application/json",
            b"100-continue",
            b"keep-alive, Upgrade",
            b"websocket",
            b"h2c",
            b"Bearer \xff\xfe",
            b"off",
            b"x" * 9000,
        ]
    ),
    st.binary(max_size=30),
)
line_end = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n "])
chat = json.dumps({"model": "double", "messages": [{"role": "user", "content": "hi"}]}).encode()
body = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"{}",
            chat,
            b"[" * 5000,
            b'{"messages":[{"content":"\xff"}],"n":1e400}',
            b"2\r\n{}\r\n0\r\n\r\n",
            b"fffffffff\r\n",
            b"2;" + b"x" * 9000 + b"\r\n{}\r\n",
            b"0\r\nHost: b\r\n\r\n",
        ]
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Nearly HTTP."""
    end = draw(line_end)
    lines = [b" ".join((draw(method), draw(target), draw(version)))]
    if draw(st.booleans()):
        lines.append(b"Host: a")
    lines += [
        n + draw(st.sampled_from([b": ", b":", b" : "])) + draw(value)
        for n in draw(st.lists(name, max_size=5))
    ]
    content = draw(body)
    if draw(st.booleans()):
        lines.append(f"Content-Length: {len(content)}".encode())
    return end.join(lines) + end + end + content


inputs = st.one_of(
    st.binary(max_size=200),
    requests(),
    st.lists(requests(), max_size=3).map(b"".join),
)


async def converse(url: str, data: bytes, places: list[int]) -> None:
    """Send ``data`` in pieces; what comes back must be answers in our shape, or nothing."""
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    async with connected(url) as (reader, writer):
        reading = asyncio.create_task(until_closed(reader))
        for start, end in zip(marks, marks[1:], strict=False):
            writer.write(data[start:end])
            await asyncio.sleep(0)
        received = await reading
    heads_only = b"HEAD " in data
    for reply in () if heads_only else replies(received):
        if reply.status >= 400 and reply.status != 404:
            assert reply.error["message"]
        elif reply.status == 404:
            assert json.loads(reply.body)["error"]["message"]
        else:
            assert reply.status in (100, 200)
            assert reply.status == 100 or json.loads(reply.body)


batches = st.lists(
    st.tuples(inputs, st.lists(st.integers(0, 10_000), max_size=4)), min_size=10, max_size=20
)


def test_any_bytes_get_an_answer_in_our_shape_or_a_closed_connection(served: Served) -> None:
    wrong: list[tuple[bytes, str]] = []

    async def tried(data: bytes, places: list[int]) -> None:
        try:
            await converse(served.stack.url, data, places)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told below
            wrong.append((data, repr(error)))

    async def all_at_once(batch: list[tuple[bytes, list[int]]]) -> None:
        async with asyncio.TaskGroup() as group:
            for data, places in batch:
                group.create_task(tried(data + LAST, places))

    # Failures are collected: shrinking what waits for timeouts would take for ever.
    @settings(
        max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(batch=batches)
    @example(batch=[(b"", []), (b"\r\n" * 3, [1]), (b"\0" * 10_000, []), (LAST * 50, [7, 700])])
    def batch_is_answered(batch: list[tuple[bytes, list[int]]]) -> None:
        served.run(all_at_once(batch))

    batch_is_answered()
    assert wrong == []


def test_after_all_that_the_router_is_well(served: Served) -> None:
    served.assert_well()
