"""What the router itself costs: added TTFT, and CPU for each relayed chunk.

Engines that cost nothing, the router, and a bare proxy that drives the same two legs, each in a
process of its own; the same load on both, in turns, in one run. Prints a table and JSON.

    python bench/relay.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from kvloop.cluster import free_ports

HERE = Path(__file__).parent
CONCURRENCY, TURNS, ROUNDS, CHUNKS, THINK_S = 16, 4, 8, (20, 220), 0.6


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def conversation(
    session: aiohttp.ClientSession, url: str, first: int, chunks: int
) -> list[float]:
    """Turns of one client; the TTFT of each, in seconds. Clients think, so turns are spread."""
    thinking = random.Random(first)
    messages = [{"role": "user", "content": f"{first} is where I start"}]
    ttfts = []
    for _ in range(TURNS):
        await asyncio.sleep(thinking.uniform(0, THINK_S))
        started_s = time.perf_counter()
        body = {"model": "fake", "messages": messages, "stream": True, "max_tokens": chunks}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.content.readany()
            ttfts.append(time.perf_counter() - started_s)
            await response.read()
        messages = [
            *messages,
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "y"},
        ]
    return ttfts


async def load(url: str, offset: int, chunks: int) -> list[float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [conversation(session, url, offset + 7 * i, chunks) for i in range(CONCURRENCY)]
        return [ttft for ttfts in await asyncio.gather(*clients) for ttft in ttfts]


def wait_ready(url: str) -> None:
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"{url}/ready") as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.05)
    raise RuntimeError(f"{url} is not ready")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    p, d, bare, routed, admin = free_ports(5)
    engines = [f"http://127.0.0.1:{p}", f"http://127.0.0.1:{d}"]
    both = ["--prefill", engines[0], "--decode", engines[1]]
    python = sys.executable
    children = {
        "engines": [python, str(HERE / "fake_engine.py"), "--ports", str(p), str(d)],
        "bare": [python, str(HERE / "bare_proxy.py"), *both, "--port", str(bare)],
        "kvloop": [
            *(python, "-m", "kvloop", "serve", *both),
            *("--port", str(routed), "--admin-port", str(admin), "--log-level", "warning"),
        ],
    }
    urls = {"bare": f"http://127.0.0.1:{bare}", "kvloop": f"http://127.0.0.1:{routed}"}
    running = {name: subprocess.Popen(command) for name, command in children.items()}
    try:
        for url in urls.values():
            wait_ready(url)
        for url in urls.values():  # warm both up
            uvloop.run(load(url, 1, CHUNKS[0]))
        ttft: dict[str, list[float]] = {"bare": [], "kvloop": []}
        cpu = {name: dict.fromkeys(CHUNKS, 0.0) for name in urls}
        for number in range(ROUNDS):
            for name in sorted(urls, reverse=bool(number % 2)):
                chunks = CHUNKS[number // 2 % 2]
                before = cpu_s(running[name].pid)
                ttft[name] += uvloop.run(load(urls[name], 10_000 + 1000 * number, chunks))
                cpu[name][chunks] += cpu_s(running[name].pid) - before
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics") as response:
            metrics = response.read().decode()
    finally:
        for child in running.values():
            child.terminate()
            child.wait()
    figures = report(ttft, cpu, metrics)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def report(
    ttft: dict[str, list[float]], cpu: dict[str, dict[int, float]], metrics: str
) -> dict[str, Any]:
    def metric(name: str) -> float:
        return sum(
            float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)
        )

    leg = 'kvloop_leg_seconds_{}{{leg="render"}}'
    render_s = metric(leg.format("sum")) / max(1.0, metric(leg.format("count")))
    turns = CONCURRENCY * TURNS * ROUNDS
    few, many = CHUNKS
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    figures |= {"cores": os.cpu_count(), "concurrency": CONCURRENCY, "turns": turns}
    print(f"{turns} turns at concurrency {CONCURRENCY}, half of {few} and half of {many} chunks")
    for name in ("bare", "kvloop"):
        p50, p99 = statistics.median(ttft[name]), percentile(ttft[name], 0.99)
        # Turns of many chunks cost what turns of few do, and the chunks between.
        by_chunk = (cpu[name][many] - cpu[name][few]) / (turns / 2 * (many - few))
        by_turn = cpu[name][few] / (turns / 2) - few * by_chunk
        figures[name] = {"ttft_p50_s": p50, "ttft_p99_s": p99}
        figures[name] |= {"cpu_s_per_chunk": by_chunk, "cpu_s_per_turn": by_turn}
        print(
            f"{name:>7}: TTFT p50 {p50 * 1e3:5.2f} ms, p99 {p99 * 1e3:5.2f} ms; CPU "
            f"{by_chunk * 1e6:.1f} us a chunk and {by_turn * 1e3:.2f} ms a turn besides"
        )
    pulls = metric('kvloop_turns_total{api="chat",route="pull"')
    figures |= {"pulled_turns": pulls, "render_mean_s": render_s}
    for share in ("p50", "p99"):
        added = figures["kvloop"][f"ttft_{share}_s"] - figures["bare"][f"ttft_{share}_s"]
        figures[f"added_ttft_{share}_s"] = added
    print(
        f"  added: TTFT p50 {figures['added_ttft_p50_s'] * 1e3:.2f} ms, "
        f"p99 {figures['added_ttft_p99_s'] * 1e3:.2f} ms (both ask for the token ids, which takes "
        f"{render_s * 1e3:.2f} ms on average); {pulls:.0f} turns were pulls"
    )
    return figures


if __name__ == "__main__":
    main()
