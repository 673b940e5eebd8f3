"""Rows of the catalogue of known failures that real engines can be driven into."""

import asyncio
import json
from typing import Any

import pytest

from kvloop.cluster import LocalCluster
from kvloop.cluster.engine_spec import SERVED_MODEL_NAME
from tests.contract.script import types
from tests.engines.client import Client, follow, metric, opening, until_nothing_is_pinned
from tests.engines.conftest import router

pytestmark = pytest.mark.calm

CHAT = "/v1/chat/completions"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
LATE = "vllm:nixl_num_notifications_after_expiry_total"


async def until_p_is_asked(client: Client) -> None:
    """Until the router has a leg on P."""
    async with asyncio.timeout(60):
        while True:
            async with client.http.get(client.admin_url + "/engines") as response:
                prefill, *_ = (await response.json())["engines"]
            if prefill["running"]:
                return
            await asyncio.sleep(0.02)


def body(messages: Any, **fields: Any) -> dict[str, Any]:
    common = {"model": SERVED_MODEL_NAME, "temperature": 0, "max_tokens": 16}
    return {**common, "messages": messages, **fields}


async def test_k07_branches_at_the_same_time_read_a_reference_once(cluster: LocalCluster) -> None:
    decode = cluster.url("decode-0")
    async with router(cluster) as client:
        late = await metric(client.http, decode, LATE)
        messages = opening()
        answer = await client.chat(messages)
        branches = [follow(messages, answer.text, text) for text in ("And then?", "Why so?", "Hm.")]
        on = await asyncio.gather(*map(client.chat, branches))
        assert sorted(one.route for one in on) == ["pull", "recompute", "recompute"]
        off = [await client.chat(branch, reuse="off") for branch in branches]
        assert [one.text for one in on] == [one.text for one in off]
        await until_nothing_is_pinned(client.http, decode)
        assert await metric(client.http, decode, LATE) == late


async def test_k12_what_nobody_will_use_is_given_back_before_its_time(
    cluster: LocalCluster,
) -> None:
    async with router(cluster) as client:
        url = cluster.url("decode-0")
        await until_nothing_is_pinned(client.http, url)
        expired = await metric(client.http, url, EXPIRED)
        await client.chat(opening(), reuse="off")
        await client.chat(opening(), reuse="last")
        await until_nothing_is_pinned(client.http, url)
        assert await metric(client.http, url, EXPIRED) == expired


async def test_k16_a_client_that_leaves_while_p_computes_strands_nothing(
    cluster: LocalCluster,
) -> None:
    url = cluster.url("prefill-0")
    async with router(cluster, orphan_grace_s=30.0) as client:
        # An idle engine keeps its first notice to another until it steps again: let them meet.
        await client.chat(opening(), reuse="last")
        await until_nothing_is_pinned(client.http, url)
        expired = await metric(client.http, url, EXPIRED)
        turn = asyncio.create_task(client.chat(opening()))
        await until_p_is_asked(client)
        turn.cancel()
        await asyncio.wait([turn])
        assert turn.cancelled()
        orphans = r'kvloop_orphaned_prefills_total\{outcome="answered"\}'
        async with asyncio.timeout(60):
            while await metric(client.http, client.admin_url, orphans) == 0:
                await asyncio.sleep(0.1)
        await until_nothing_is_pinned(client.http, url)
        assert await metric(client.http, url, EXPIRED) == expired


async def test_k17_several_choices_pin_nothing(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        await until_nothing_is_pinned(client.http, cluster.url("decode-0"))
        asked = body(opening(), n=2, temperature=1.0)
        answer = await client.post(CHAT, asked)
        assert (answer.status, answer.route) == (200, "append")
        assert len(json.loads(answer.raw)["choices"]) == 2
        for name in ("prefill-0", "decode-0"):
            url = cluster.url(name)
            assert await metric(client.http, url, "vllm:kv_cache_usage_perc") == 0


async def test_k18_the_first_event_arrives_while_d_still_generates(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        asked = body(opening(), stream=True, max_tokens=64, ignore_eos=True)
        async with client.http.post(client.url + CHAT, json=asked) as response:
            await response.content.readuntil(b"\n\n")
            url = cluster.url("decode-0")
            assert await metric(client.http, url, "vllm:num_requests_running") == 1
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_k19_transfer_fields_of_a_client_reach_no_engine(cluster: LocalCluster) -> None:
    """Each of these kills an engine, or takes another's KV, when it is sent straight to one."""
    forged: list[Any] = [
        {"do_remote_prefill": True, "do_remote_decode": False},
        {"do_remote_prefill": False, "do_remote_decode": False},
        {"do_remote_decode": True, "remote_block_ids": [[1, 2, 3]], "remote_num_tokens": 96},
        "x",
    ]
    async with router(cluster) as client:
        messages = opening()
        right = await client.chat(messages, reuse="off")
        for fields in forged:
            field = {"kv_transfer_params": fields}
            for more in (field, {"vllm_xargs": field}):
                answer = await client.post(CHAT, body(messages, cache_salt="off", **more))
                if answer.status == 200:
                    said = json.loads(answer.raw)["choices"][0]["message"]["content"]
                    assert said == right.text
                else:
                    assert answer.status == 400
        again = await client.chat(messages, reuse="off")
        assert again.text == right.text


async def test_k30_an_answer_has_all_that_the_engine_gives(cluster: LocalCluster) -> None:
    """Log-probabilities, ids, usage, a response format: through P and D as from one engine."""
    asked = body(
        opening(),
        response_format={"type": "json_object"},
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        stop=["never said"],
    )
    async with router(cluster) as client:
        through = json.loads((await client.post(CHAT, asked)).raw)
        async with client.http.post(cluster.url("decode-0") + CHAT, json=asked) as response:
            direct = await response.json()
    for answer in (through, direct):
        answer["usage"].pop("prompt_tokens_details")  # who had what cached is another matter
    assert direct.pop("kv_transfer_params") is None  # the router's own affair
    assert types(through) == types(direct)
    assert through["usage"] == direct["usage"]
    ours, theirs = through["choices"][0], direct["choices"][0]
    for name in ("message", "token_ids", "finish_reason", "stop_reason"):
        assert ours[name] == theirs[name]
    for one, two in zip(ours["logprobs"]["content"], theirs["logprobs"]["content"], strict=True):
        assert one["token"] == two["token"]
        assert abs(one["logprob"] - two["logprob"]) < 0.01
