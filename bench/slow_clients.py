"""Many clients that read slowly through one router: all complete, and the router's memory is flat.

Each client has a small receive buffer and reads a few hundred bytes a second of an answer that the
engine gives much faster; after a while all of them read on to the end, and every byte is compared.
Engines, router and clients are processes of their own. Prints the router's memory over time.

    python bench/slow_clients.py [--clients 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from kvloop.cluster import free_ports
from relay import cpu_s, wait_ready

HERE = Path(__file__).parent
RECEIVE_BUFFER_BYTES = 4096
READ_BYTES, READ_EVERY_S = 200, 0.5
OPENED_AT_ONCE = 20
MIB = 2**20


@dataclass
class Hurry:
    """Whether clients read as fast as they can."""

    now: bool = False


class Router:
    """What /proc says of the router's process."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.pid = pid

    def rss_bytes(self) -> int:
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(list((self._proc / "fd").iterdir()))


class Answer:
    """A chunked answer as it comes in; only its hash is kept."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._in_body = False
        self._body = hashlib.sha256()
        self.num_bytes = 0
        self.is_whole = False

    @property
    def digest(self) -> str:
        return self._body.hexdigest()

    def feed(self, data: bytes) -> None:
        """Raises ValueError for what is no answer."""
        self._rest += data
        if not self._in_body:
            head, blank, rest = bytes(self._rest).partition(b"\r\n\r\n")
            if not blank:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise ValueError(bytes(self._rest[:500]).decode(errors="replace"))
            self._rest, self._in_body = bytearray(rest), True
        while not self.is_whole:
            size, line_end, _ = bytes(self._rest[:20]).partition(b"\r\n")
            start = len(size) + 2
            if not line_end or len(self._rest) < start + int(size, 16) + 2:
                return
            chunk = self._rest[start : start + int(size, 16)]
            self._body.update(chunk)
            self.num_bytes += len(chunk)
            self.is_whole = not chunk
            del self._rest[: start + len(chunk) + 2]


async def client(
    number: int, port: int, chunks: int, opening: asyncio.Semaphore, begun: list[int], hurry: Hurry
) -> Answer:
    """One turn, read slowly until it is time to hurry."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    sock.setblocking(False)
    messages = [{"role": "user", "content": f"{10_000 + number} is where I start"}]
    turn = {"model": "fake", "messages": messages, "stream": True, "max_tokens": chunks}
    data = json.dumps(turn).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    answer = Answer()
    with sock:
        async with opening:
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, head.encode() + data)
            answer.feed(await loop.sock_recv(sock, READ_BYTES))
        begun.append(number)
        while piece := await loop.sock_recv(sock, 65536 if hurry.now else READ_BYTES):
            answer.feed(piece)
            if not hurry.now:
                await asyncio.sleep(READ_EVERY_S)
    return answer


async def watch(router: Router, samples: list[tuple[float, int]], started_s: float) -> None:
    while True:
        samples.append((time.monotonic() - started_s, router.rss_bytes()))
        await asyncio.sleep(1)


async def run(options: argparse.Namespace, port: int, router: Router) -> dict[str, Any]:
    opening, begun, hurry = asyncio.Semaphore(OPENED_AT_ONCE), [], Hurry()
    await client(-1, port, 3, opening, [], Hurry(now=True))  # warms the router up
    before_files, before_rss = router.open_files(), router.rss_bytes()
    started_s, cpu_before_s = time.monotonic(), cpu_s(router.pid)
    samples: list[tuple[float, int]] = []
    watcher = asyncio.create_task(watch(router, samples, started_s))
    clients = [
        asyncio.create_task(client(number, port, options.chunks, opening, begun, hurry))
        for number in range(options.clients)
    ]
    while len(begun) < options.clients and not any(one.done() for one in clients):
        await asyncio.sleep(0.1)
    begun_s = time.monotonic() - started_s
    print(f"{len(begun)} streams have begun after {begun_s:.1f} s")
    await asyncio.sleep(options.slow_s)
    slow_until_s, slow_files = time.monotonic() - started_s, router.open_files()
    hurry.now = True
    answers = await asyncio.gather(*clients, return_exceptions=True)
    ended_s = time.monotonic() - started_s
    watcher.cancel()
    return {
        "begun_s": begun_s,
        "slow_until_s": slow_until_s,
        "ended_s": ended_s,
        "answers": answers,
        "samples": samples,
        "router_cpu_s": cpu_s(router.pid) - cpu_before_s,
        "rss_before_bytes": before_rss,
        "open_files": {"before": before_files, "slow": slow_files},
    }


def direct(engine: str, chunks: int) -> str:
    """The hash of an answer as the engine gives it."""
    turn = {"messages": [{"content": "1"}], "stream": True, "max_tokens": chunks}
    data = json.dumps({**turn, "kv_transfer_params": {}}).encode()
    with urllib.request.urlopen(f"{engine}/v1/chat/completions", data) as response:
        return hashlib.sha256(response.read()).hexdigest()


async def settle(router: Router, files: int) -> int:
    """Open files once they are back, or after a while."""
    for _ in range(100):
        if router.open_files() <= files:
            break
        await asyncio.sleep(0.1)
    return router.open_files()


def report(options: argparse.Namespace, seen: dict[str, Any]) -> dict[str, Any]:
    answers: list[Answer | BaseException] = seen.pop("answers")
    whole = [answer for answer in answers if isinstance(answer, Answer) and answer.is_whole]
    failures = [repr(answer) for answer in answers if isinstance(answer, BaseException)]
    right = sum(answer.digest == options.digest for answer in whole)
    samples: list[tuple[float, int]] = seen.pop("samples")
    slow = [rss for at_s, rss in samples if seen["begun_s"] <= at_s <= seen["slow_until_s"]]
    # The buffers in front of the clients fill up first; then nothing may grow.
    half = len(slow) // 2
    full, later = statistics.median(slow[half - 3 : half + 3]), max(slow[half:])
    figures: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "clients": options.clients,
        "answer_bytes": whole[0].num_bytes if whole else 0,
        "bytes_read_by_a_client_in_a_second": READ_BYTES / READ_EVERY_S,
        "complete": len(whole),
        "right": right,
        "failures": failures[:5],
        **seen,
        "rss_while_slow_bytes": {
            "begun": slow[0],
            "halfway": full,
            "highest_after_halfway": later,
            "end": slow[-1],
        },
        "rss_for_each_client_bytes": (max(slow) - seen["rss_before_bytes"]) / options.clients,
        "growth_after_halfway": later / full - 1,
        "rss_bytes_each_second": [rss for _, rss in samples],
    }
    size = figures["answer_bytes"]
    print(f"{right} of {options.clients} answers of {size:,} bytes are complete and right")
    for at_s, rss in samples[:: max(1, len(samples) // 16)]:
        print(f"  {at_s:5.0f} s  {rss / MIB:6.1f} MiB")
    print(
        f"memory {figures['rss_for_each_client_bytes'] / 1024:.0f} KiB for each client; it grew by "
        f"{figures['growth_after_halfway']:.1%} in the second half of the slow time"
    )
    files = figures["open_files"]
    print(
        f"open files: {files['before']} before, {files['slow']} while slow, {files['after']} after"
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=150, help="events of an answer")
    parser.add_argument("--slow-s", type=float, default=60.0, help="how long clients are slow")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    p, d, port, admin = free_ports(4)
    engines = [f"http://127.0.0.1:{p}", f"http://127.0.0.1:{d}"]
    python = sys.executable
    running = [
        subprocess.Popen(
            [
                python,
                str(HERE / "fake_engine.py"),
                "--ports",
                str(p),
                str(d),
                "--pace-ms",
                "200",
                *("--token-bytes", "4000"),
            ]
        ),
        subprocess.Popen(
            [
                *(python, "-m", "kvloop", "serve", "--prefill", engines[0], "--decode", engines[1]),
                *("--port", str(port), "--admin-port", str(admin), "--log-level", "warning"),
                *("--no-check-releases", "--connect-timeout-s", "10"),
            ]
        ),
    ]
    try:
        wait_ready(f"http://127.0.0.1:{port}")
        router = Router(running[1].pid)
        # What an engine gives without anybody in between.
        options.digest = direct(engines[1], options.chunks)
        seen = uvloop.run(run(options, port, router))
        seen["open_files"]["after"] = uvloop.run(settle(router, seen["open_files"]["before"]))
        seen["rss_after_bytes"] = router.rss_bytes()
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics") as response:
            assert b"kvloop_turns_in_flight 0.0" in response.read()
    finally:
        for child in running:
            child.terminate()
            child.wait()
    figures = report(options, seen)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["right"] != options.clients:
        sys.exit(f"some answers were not right: {figures['failures']}")


if __name__ == "__main__":
    main()
