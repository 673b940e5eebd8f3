"""A prefill and a decode node with KVLoopConnector, started once for all tests of this folder."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs engines."""
    for item in items:
        if "tests/claims" in str(item.path):
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="package")
def claiming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """`prefill-0` without prefix cache, `decode-0`; both with KVLoopConnector."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
        pytest.skip("vLLM and NIXL are not installed (`make engines`)")
    for_prefill, for_decode = share_cores(sorted(os.sched_getaffinity(0)), 2)
    model = prepare_model(None, print)
    specs = [
        prefill_spec(model, cores=for_prefill, claims=True),
        decode_spec(model, cores=for_decode, claims=True),
    ]
    engines = LocalCluster(specs, tmp_path_factory.mktemp("claims"), print)
    with asyncio.Runner() as runner:
        runner.run(engines.__aenter__())
        try:
            yield engines
        finally:
            runner.run(engines.__aexit__(None, None, None))


@asynccontextmanager
async def router(cluster: LocalCluster, **settings: object) -> AsyncIterator[Client]:
    """A router in front of the two, and a client of it."""
    chosen = {
        "prefill": (cluster.url("prefill-0"),),
        "decode": (cluster.url("decode-0"),),
        "port": 0,
        "admin_port": 0,
        **settings,
    }
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(running(Settings(**chosen)))  # type: ignore[arg-type]
        await wait_until_ready(url, timeout_s=60)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(http, url)
