"""The two kinds of target: doubles on loopback, and vLLM's engines of a local cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvloop.cluster import EngineSpec, LocalCluster, decode_spec, prefill_spec
from kvloop.cluster.engine_spec import SERVED_MODEL_NAME
from tests.contract.target import BLOCK_SIZE, ENGINES, LEASE_S, TTL_S, Target
from tests.double.engine import Engine, Fabric
from tests.double.http import serving

NAMES = {"P": "prefill-0", "D": "decode-0"}
EXACT = ("--dtype", "float32")
"""In bf16 another batch is another rounding, and now and then another greedy token."""
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""Of KV, SmolLM2-135M: layers, K and V, heads, size, float32."""
_MAX_MODEL_LEN = 4096
_TOKEN_DELAY_S = 0.001
"""Long enough that a client can leave in the middle."""


@asynccontextmanager
async def doubles() -> AsyncIterator[Target]:
    fabric = Fabric()
    async with AsyncExitStack() as stack:
        urls: dict[str, str] = {}
        for name in ENGINES:
            engine = Engine(
                fabric, block_size=BLOCK_SIZE, prefix_caching=name != "P", ttl_s=float(TTL_S)
            )
            engine.lease_s = float(LEASE_S)
            engine.max_model_len = _MAX_MODEL_LEN
            engine.reports_cached_tokens = True
            engine.token_delay_s = _TOKEN_DELAY_S
            urls[name] = await stack.enter_async_context(serving(engine))

        async def pass_time(seconds: float) -> None:
            fabric.now_s += seconds

        http = await stack.enter_async_context(aiohttp.ClientSession())
        block_bytes = BLOCK_SIZE * engine.bytes_per_token
        yield Target(http, urls, engine.model, block_bytes, pass_time, settle_s=0.0)


def specs(model: Path, for_prefill: tuple[int, ...], for_decode: tuple[int, ...]) -> Any:
    """The engines that the script needs, as the recording was made on."""
    common: dict[str, Any] = {
        "extra_args": EXACT,
        "kv_lease_duration_s": LEASE_S,
        "decoder_kv_blocks_ttl_s": TTL_S,
    }
    found: list[EngineSpec] = [
        prefill_spec(model, cores=for_prefill, **common),
        decode_spec(model, cores=for_decode, **common),
    ]
    return found


@asynccontextmanager
async def real(cluster: LocalCluster) -> AsyncIterator[Target]:
    """A cluster of :func:`specs`, on which nothing else runs meanwhile."""
    urls = {name: cluster.url(NAMES[name]) for name in ENGINES}
    async with aiohttp.ClientSession() as http:
        yield Target(
            http, urls, SERVED_MODEL_NAME, BLOCK_SIZE * TOKEN_BYTES, asyncio.sleep, settle_s=0.1
        )
