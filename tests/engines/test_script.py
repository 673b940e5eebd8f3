"""What the double was validated with is still what vLLM does."""

import pytest

from kvloop.cluster import LocalCluster
from tests.contract.engines import real
from tests.contract.recording import read
from tests.contract.script import differences, run
from tests.contract.steps import STEPS
from tests.engines.client import until_nothing_is_pinned

pytestmark = pytest.mark.calm


async def test_vllm_gives_the_sequence_that_was_recorded_from_it(cluster: LocalCluster) -> None:
    async with real(cluster) as target:
        for name in ("prefill-0", "decode-0"):
            await until_nothing_is_pinned(target.http, cluster.url(name))
        seen = {name: what async for name, what in run(target, STEPS)}
    assert differences(read(), seen) == {}
