"""Real vLLM engines over real NIXL, started once for all tests of this folder."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvloop.cluster import LocalCluster, prepare_model
from kvloop.cluster.layout import share_cores
from kvloop.config import Settings
from kvloop.gateway.app import Router
from kvloop.gateway.server import serving, wait_until_ready
from tests.contract.engines import specs as engine_specs
from tests.contract.target import TTL_S
from tests.engines.client import Client

DECODER_TTL_S = TTL_S
"""Short enough to see a reference expire, long enough for a turn."""
_MARGIN_S = 6.0
"""More than the 5 s within which P refuses by itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs engines."""
    for item in items:
        if "tests/engines" in str(item.path):
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """`prefill-0` without prefix cache, `decode-0` with one; either can take the other's role."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
        pytest.skip("vLLM and NIXL are not installed (`make engines`)")
    cores = share_cores(sorted(os.sched_getaffinity(0)), 2)
    specs = engine_specs(prepare_model(None, print), *cores)
    engines = LocalCluster(specs, tmp_path_factory.mktemp("engines"), print)
    with asyncio.Runner() as runner:
        runner.run(engines.__aenter__())
        try:
            yield engines
        finally:
            runner.run(engines.__aexit__(None, None, None))


@asynccontextmanager
async def router(
    cluster: LocalCluster, prefill: str = "prefill-0", decode: str = "decode-0", **settings: object
) -> AsyncIterator[Client]:
    """A router in front of one P and the D, and a client of it."""
    chosen = {
        "prefill": (cluster.url(prefill),),
        "decode": (cluster.url(decode),),
        "port": 0,
        "admin_port": 0,
        "kv_ttl_s": float(DECODER_TTL_S),
        "deadline_margin_s": _MARGIN_S,
        "check_releases": False,  # it pins and releases of its own accord
        **settings,
    }
    async with AsyncExitStack() as stack:
        opened = serving(Router(Settings(**chosen)))  # type: ignore[arg-type]
        addresses = await stack.enter_async_context(opened)
        await wait_until_ready(addresses.url, timeout_s=60)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(http, addresses.url, addresses.admin_url or "")
