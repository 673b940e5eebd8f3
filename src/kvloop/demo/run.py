"""The demo from start to end: model, engines, router, conversation, table."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from kvloop.cluster import LocalCluster, one_pair, prepare_model
from kvloop.config import Settings
from kvloop.demo.measure import TurnResult, play, warm_up
from kvloop.demo.report import MovedBytes, add_turn, as_json, new_table, summary
from kvloop.engines.fleet import Role
from kvloop.gateway.server import running, wait_until_ready

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

_BYTES_METRIC = "vllm:nixl_bytes_transferred_sum"


async def run_demo(console: Console, run_dir: Path, num_turns: int) -> dict[str, Any]:
    """Run it; returns the figures. Raises EngineStartError, ModelUnavailableError."""

    def report(line: str) -> None:
        console.print(f"[dim]{line}[/dim]")

    model = prepare_model(None, report)
    async with AsyncExitStack() as stack:
        report(f"starting one prefill and one decode node (logs in {run_dir})")
        cluster = await stack.enter_async_context(LocalCluster(one_pair(model), run_dir, report))
        settings = Settings(
            prefill=cluster.urls(Role.PREFILL),
            decode=cluster.urls(Role.DECODE),
            port=0,
            admin_port=0,
        )
        url = await stack.enter_async_context(running(settings))
        await wait_until_ready(url, timeout_s=60)
        report(f"router ready at {url}; warming up")
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300)
        )
        await warm_up(client)
        before = await _moved(cluster)
        table = new_table()

        def tell(result: TurnResult) -> None:
            add_turn(table, result)
            report(
                f"turn {result.turn} of {num_turns}: {result.on.prompt_tokens} tokens, TTFT "
                f"{result.off.ttft_s:.2f} s off, {result.on.ttft_s:.2f} s on"
            )

        async def bytes_read() -> int:
            return await _bytes_read(cluster.urls(Role.PREFILL))

        turns = await play(client, num_turns, tell, bytes_read)
        moved = _difference(await _moved(cluster), before)
    console.print(table)
    console.print(summary(turns, moved), highlight=False)
    return as_json(turns, moved)


async def _moved(cluster: LocalCluster) -> MovedBytes:
    """NIXL's bytes are counted by the side that reads."""
    return MovedBytes(
        decode_to_prefill=await _bytes_read(cluster.urls(Role.PREFILL)),
        prefill_to_decode=await _bytes_read(cluster.urls(Role.DECODE)),
    )


async def _bytes_read(urls: tuple[str, ...]) -> int:
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            total += sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == _BYTES_METRIC
            )
    return int(total)


def _difference(after: MovedBytes, before: MovedBytes) -> MovedBytes:
    return MovedBytes(
        after.decode_to_prefill - before.decode_to_prefill,
        after.prefill_to_decode - before.prefill_to_decode,
    )
