"""Real vLLM engines over real NIXL, started once for all tests of this folder."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvloop.cluster import LocalCluster, decode_spec, prefill_spec, prepare_model
from kvloop.cluster.layout import share_cores
from kvloop.config import Settings
from kvloop.gateway.server import running, wait_until_ready
from tests.engines.client import Client

DECODER_TTL_S = 60
"""Short enough to see a reference expire, long enough for a turn."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs engines."""
    for item in items:
        if "tests/engines" in str(item.path):
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """`prefill-0` without prefix cache, `prefill-cached` with one, `decode-0`."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
        pytest.skip("vLLM and NIXL are not installed (`make engines`)")
    for_prefill, for_decode = share_cores(sorted(os.sched_getaffinity(0)), 2)
    model = prepare_model(None, print)
    specs = [
        prefill_spec(model, cores=for_prefill),
        prefill_spec(model, name="prefill-cached", cores=for_prefill, prefix_caching=True),
        decode_spec(model, cores=for_decode, decoder_kv_blocks_ttl_s=DECODER_TTL_S),
    ]
    engines = LocalCluster(specs, tmp_path_factory.mktemp("engines"), print)
    with asyncio.Runner() as runner:
        runner.run(engines.__aenter__())
        try:
            yield engines
        finally:
            runner.run(engines.__aexit__(None, None, None))


@asynccontextmanager
async def router(
    cluster: LocalCluster, prefill: str = "prefill-0", **settings: object
) -> AsyncIterator[Client]:
    """A router in front of one P and the D, and a client of it."""
    chosen = {
        "prefill": (cluster.url(prefill),),
        "decode": (cluster.url("decode-0"),),
        "port": 0,
        "kv_ttl_s": float(DECODER_TTL_S),
        **settings,
    }
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(running(Settings(**chosen)))  # type: ignore[arg-type]
        await wait_until_ready(url, timeout_s=60)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(http, url)
