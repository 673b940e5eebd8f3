"""TTFT of a pulled turn against the same turn with the history in P's own prefix cache.

Real engines: a P without prefix cache that pulls, a P with one that was sent the history, one D.
Pairs in turns, medians and their ratio. Prints a table and JSON.

    python bench/ttft.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from kvloop.cluster import LocalCluster, decode_spec, prefill_spec, prepare_model
from kvloop.cluster.layout import share_cores
from kvloop.config import Settings
from kvloop.demo.conversation import opening, tool_result
from kvloop.demo.measure import Leg, ask, warm_up
from kvloop.gateway.server import running, wait_until_ready

PAIRS = 6


async def second_turn(client: AsyncOpenAI, reuse: str, salt: str) -> Leg:
    """A fresh conversation's second turn."""
    messages = opening(salt)
    first = await ask(client, messages, reuse, salt)
    messages = [*messages, {"role": "assistant", "content": first.text}, *tool_result(1)]
    return await ask(client, messages, reuse, salt)


async def measure() -> dict[str, Any]:
    for_prefill, for_decode = share_cores(sorted(os.sched_getaffinity(0)), 2)
    model = prepare_model(None, print)
    specs = [
        prefill_spec(model, cores=for_prefill),
        prefill_spec(model, name="prefill-cached", cores=for_prefill, prefix_caching=True),
        decode_spec(model, cores=for_decode),
    ]
    async with AsyncExitStack() as stack:
        logs = Path(tempfile.mkdtemp(prefix="kvloop-bench-"))
        cluster = await stack.enter_async_context(LocalCluster(specs, logs, print))
        clients = {}
        for prefill in ("prefill-0", "prefill-cached"):
            settings = Settings(
                prefill=(cluster.url(prefill),),
                decode=(cluster.url("decode-0"),),
                port=0,
                admin_port=0,
            )
            url = await stack.enter_async_context(running(settings))
            await wait_until_ready(url, timeout_s=60)
            clients[prefill] = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", timeout=300)
            await warm_up(clients[prefill])
        legs: dict[str, list[Leg]] = {"pulled": [], "cached": []}
        for number in range(PAIRS):
            for kind in sorted(legs, reverse=bool(number % 2)):
                salt = secrets.token_hex(4)
                if kind == "pulled":
                    leg = await second_turn(clients["prefill-0"], "on", salt)
                    assert leg.kind == "pull"
                else:
                    leg = await second_turn(clients["prefill-cached"], "off", salt)
                legs[kind].append(leg)
                print(f"  {kind}: TTFT {leg.ttft_s:.2f} s, {leg.computed_tokens} computed")
    return figures_of(legs)


def figures_of(legs: dict[str, list[Leg]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"pairs": PAIRS}
    for kind, measured in legs.items():
        figures[f"ttft_{kind}_median_s"] = statistics.median(leg.ttft_s for leg in measured)
        figures[f"computed_{kind}_median"] = statistics.median(
            leg.computed_tokens for leg in measured
        )
    figures["ratio"] = figures["ttft_pulled_median_s"] / figures["ttft_cached_median_s"]
    print(
        f"TTFT pulled {figures['ttft_pulled_median_s']:.2f} s "
        f"({figures['computed_pulled_median']:.0f} tokens computed), in P's own cache "
        f"{figures['ttft_cached_median_s']:.2f} s ({figures['computed_cached_median']:.0f} "
        f"computed), ratio {figures['ratio']:.2f} (target 1.15)"
    )
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = asyncio.run(measure())
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
