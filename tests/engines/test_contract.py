"""What kvloop relies on in vLLM: each fails when a version changes it."""

import json
import re

from kvloop.cluster import LocalCluster
from tests.engines.client import follow, opening
from tests.engines.conftest import DECODER_TTL_S, router


async def test_the_plugin_runs_in_the_engines_and_says_what_they_are(cluster: LocalCluster) -> None:
    async with (
        router(cluster) as client,
        client.http.get(cluster.url("decode-0") + "/metrics") as response,
    ):
        text = await response.text()
    labels = re.search(r"^kvloop:engine_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    assert labels is not None
    for expected in ('bidirectional_kv_xfer="true"', f'decoder_kv_blocks_ttl_s="{DECODER_TTL_S}"'):
        assert expected in labels[1]


async def test_an_unasked_stream_is_vllms_own(cluster: LocalCluster) -> None:
    body = {
        "model": "smollm2",
        "messages": opening(),
        "max_tokens": 4,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    async with router(cluster) as client:
        url = cluster.url("decode-0") + "/v1/chat/completions"
        async with client.http.post(url, json=body) as response:
            direct = (await response.read()).decode()
        through = (await client.post("/v1/chat/completions", body)).raw.decode()
    assert "kvloop" not in direct

    def shape(stream: str) -> list[str]:
        """Events without ids, times and what P and D count differently."""
        events = [event for event in stream.split("\n\n") if event]
        return [
            re.sub(r'"(id|created|prompt_tokens_details)":("[^"]*"|\d+|\{[^}]*\})', "", e)
            for e in events
        ]

    assert shape(direct) == shape(through)


async def test_a_prefill_node_with_a_prefix_cache_is_right_whatever_it_holds(
    cluster: LocalCluster,
) -> None:
    swapped = {"prefill": "decode-0", "decode": "prefill-0"}
    async with router(cluster, **swapped, threshold_tokens=1) as client:
        messages = opening()
        answer = await client.both(messages)
        for text in ("And what else?", "Why is that?"):
            messages = follow(messages, answer.text, text)
            answer = await client.both(messages)


async def test_models_and_errors_are_the_engines(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        async with client.http.get(client.url + "/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["smollm2"]
        wrong = await client.post("/v1/chat/completions", {"model": "x", "messages": opening()})
        assert wrong.status == 404
        assert json.loads(wrong.raw)["error"]["type"] == "NotFoundError"
        long = await client.post(
            "/v1/completions", {"model": "smollm2", "prompt": "word " * 9000, "max_tokens": 1}
        )
        assert long.status == 400
