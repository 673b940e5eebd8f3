"""`kvloop serve` as a process: signals, drains, what is given back."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvloop.gateway.keys import add_key
from kvloop.gateway.server import wait_until_ready
from tests.double.engine import Engine, Fabric, reference_answer
from tests.double.http import serving, until
from tests.double.tokens import decode, render_chat
from tests.router.stack import opening
from tests.streams import streamed_text

CHAT = "/v1/chat/completions"


@dataclass
class Served:
    """A router process, its engines, and a client."""

    process: asyncio.subprocess.Process
    url: str
    admin_url: str
    http: aiohttp.ClientSession
    prefill: Engine
    decode: Engine

    def streamed(self, **fields: Any) -> Any:
        """A turn that is answered as its tokens are let go."""
        body = {"model": "double", "messages": opening(), "max_tokens": 12, "stream": True}
        return self.http.post(self.url + CHAT, json={**body, **fields})

    async def ready(self, url: str) -> tuple[int, Any]:
        async with self.http.get(f"{url}/ready") as response:
            return response.status, await response.json()

    async def is_draining(self) -> None:
        while (await self.ready(self.url))[0] == 200:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Served]:
    fabric = Fabric()
    prefill, decode_ = Engine(fabric, prefix_caching=False), Engine(fabric)
    async with AsyncExitStack() as open_:
        urls = [await open_.enter_async_context(serving(one)) for one in (prefill, decode_)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvloop", "serve", "--port", "0", "--admin-port", "0"),
            *("--prefill", urls[0], "--decode", urls[1], "--no-check-releases", *flags),
            stderr=asyncio.subprocess.PIPE,
        )
        open_.push_async_callback(_end, process)
        assert process.stderr is not None
        said, addresses = b"", []
        async with asyncio.timeout(20):
            while len(addresses) < 2:
                line = await process.stderr.readline()
                assert line, f"the router ended: {said.decode()}"
                said += line
                addresses = re.findall(rb"(?:listens|engines are) on (http://\S+)", said)
        log = asyncio.create_task(process.stderr.read())
        url, admin_url = (address.decode() for address in addresses)
        http = await open_.enter_async_context(aiohttp.ClientSession())
        await wait_until_ready(url, timeout_s=20)
        yield Served(process, url, admin_url, http, prefill, decode_)
    assert b"Traceback" not in await log


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_running_streams_go_on_to_their_end_and_nothing_new_begins() -> None:
    async with served() as s:
        s.decode.token_gate = asyncio.Semaphore(3)
        async with s.streamed() as stream:
            begun = await stream.content.readany()
            s.process.send_signal(signal.SIGTERM)
            await s.is_draining()
            for url in (s.url, s.admin_url):
                status, state = await s.ready(url)
                assert (status, state["missing"]) == (503, ["draining"])
            async with s.streamed() as refused:
                assert refused.status == 503
                assert refused.headers["retry-after"]
                assert refused.headers["connection"] == "close"
                assert (await refused.json())["error"]["code"] == 503
            assert s.process.returncode is None
            for _ in range(50):
                s.decode.token_gate.release()
            answer = begun + await stream.read()
        assert streamed_text(answer) == decode(reference_answer(render_chat(opening()), 12))
        assert answer.endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(20):
            assert await s.process.wait() == 0
        assert len(s.decode.requests) == 1
        assert s.decode.pinned_blocks == 0  # what the ledger held was given back


async def test_a_stream_that_does_not_end_is_cut_off_when_the_time_is_over() -> None:
    async with served("--drain-timeout-s", "0.3") as s:
        s.decode.token_gate = asyncio.Semaphore(3)
        async with s.streamed() as stream:
            await stream.content.readany()
            s.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(20):
                assert await s.process.wait() == 0
        await until(lambda: s.decode.disconnects == 1)
        assert s.decode.pinned_blocks == 0


async def test_a_second_signal_ends_the_process_at_once() -> None:
    async with served() as s:
        s.decode.token_gate = asyncio.Semaphore(3)
        async with s.streamed() as stream:
            await stream.content.readany()
            s.process.send_signal(signal.SIGTERM)
            await s.is_draining()
            s.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await s.process.wait() == -signal.SIGTERM


async def test_without_turns_the_process_ends_soon() -> None:
    async with served() as s:
        s.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await s.process.wait() == 0


async def test_keys_are_read_again_on_sighup(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add_key(file, "ann")
    async with served("--api-keys", str(file)) as s:
        new = add_key(file, "bob")
        s.process.send_signal(signal.SIGHUP)
        async with s.streamed() as refused:
            assert refused.status == 401
        async with asyncio.timeout(20):
            while True:
                headers = {"authorization": f"Bearer {new}"}
                async with s.http.get(f"{s.url}/v1/models", headers=headers) as response:
                    if response.status == 200:
                        break
        assert s.process.returncode is None
