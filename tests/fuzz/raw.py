"""Bytes to a router's socket and back, with no HTTP library between."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in it, whose shape is checked."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"]
        assert error["code"] == self.status
        assert self.headers["content-type"].startswith("application/json")
        return error


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def connected(
    url: str, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the router; ``receive_buffer`` in bytes, small for a client that is slow."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port_of(url)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def until_closed(reader: asyncio.StreamReader, timeout_s: float = 20.0) -> bytes:
    """All that comes until the router closes. Raises TimeoutError if it does not."""
    received = b""
    async with asyncio.timeout(timeout_s):
        try:
            while chunk := await reader.read(65536):
                received += chunk
        except ConnectionResetError:
            pass  # closed, with something of ours unread
    return received


async def exchange(url: str, data: bytes) -> list[Reply]:
    """What the router says to ``data`` until it closes the connection."""
    async with connected(url) as (reader, writer):
        writer.write(data)
        return replies(await until_closed(reader))


def replies(received: bytes) -> list[Reply]:
    """The responses in ``received``, each whole."""
    found = []
    while received:
        head, blank, received = received.partition(b"\r\n\r\n")
        assert blank, f"no whole head: {head!r}"
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        assert version in ("HTTP/1.1", "HTTP/1.0"), status_line
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = received
        if "content-length" in headers:
            length = int(headers["content-length"])
            assert len(received) >= length
            body, received = received[:length], received[length:]
        elif rest.startswith("100"):
            body = b""
        else:
            received = b""
        found.append(Reply(int(rest[:3]), headers, body))
    return found
