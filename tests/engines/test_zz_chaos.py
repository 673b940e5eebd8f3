"""Last of this folder, for it kills the engines: `bench/chaos.py` in small."""

import pytest
from bench.chaos import Plan, chaos

from kvloop.cluster import LocalCluster
from tests.engines.conftest import DECODER_TTL_S

pytestmark = pytest.mark.calm

PROBE_S = 0.5


async def test_k09_p_and_d_die_and_return_while_conversations_go_on(cluster: LocalCluster) -> None:
    plan = Plan(turns=24, conversations=4, kills=("decode-0", "prefill-0"), seed=5)
    ttl = {"kv_ttl_s": float(DECODER_TTL_S), "deadline_margin_s": 6.0}
    told = await chaos(plan, cluster, print, probe_interval_s=PROBE_S, **ttl)
    assert told["turns_answered"] == plan.turns
    assert told["wrong_answers"] == []
    assert told["hangs"] == 0
    assert [kill["engine"] for kill in told["kills"]] == list(plan.kills)
    assert told["routes"]["pull"] > 0
    # Until its next look the router takes an engine that is back for one that is gone.
    assert all(one["since_healthy_s"] <= 4 * PROBE_S for one in told["failures_not_excused"])
