"""Claims on real engines over real NIXL: the answers are those of a run without reuse."""

import asyncio
import re
from typing import Any

from kvloop.cluster import LocalCluster
from tests.claims.conftest import router
from tests.engines.client import Client, follow, opening

LONGER = " ".join(f"Also, sentence {i} says that the water is {i} degrees." for i in range(1, 9))


async def metric(client: Client, url: str, name: str) -> float:
    """The sum of an engine's samples of one metric."""
    async with client.http.get(f"{url}/metrics") as response:
        text = await response.text()
    return sum(
        float(value) for value in re.findall(rf"^{name}\S* ([0-9.e+-]+)$", text, re.MULTILINE)
    )


async def until_nothing_is_held(client: Client, cluster: LocalCluster, name: str) -> None:
    """An engine reports when it steps: nudge it."""
    url = cluster.url(name)
    async with asyncio.timeout(60):
        while await metric(client, url, "vllm:kv_cache_usage_perc") > 0:
            nudge = {"model": "smollm2", "prompt": "x", "max_tokens": 1}
            async with client.http.post(f"{url}/v1/completions", json=nudge) as response:
                assert response.status == 200
                await response.read()


async def test_a_conversation_is_read_by_claim_and_nothing_stays_held(
    claiming: LocalCluster,
) -> None:
    async with router(claiming) as client:
        p, d = claiming.url("prefill-0"), claiming.url("decode-0")
        watched = [
            (p, "vllm:nixl_bytes_transferred_sum"),
            (p, "kvloop:claims_asked_total"),
            (p, "kvloop:claims_missed_total"),
            (p, "kvloop:claim_latency_seconds_count"),
            (p, "kvloop:claimed_tokens_read_total"),
            (d, "kvloop:claims_granted_total"),
            (d, "kvloop:claimed_tokens_granted_total"),
        ]
        before = [await metric(client, url, name) for url, name in watched]
        messages = opening()
        answer = await client.both(messages)
        pulled = 0
        for text in ("And what else?", "Why is that?"):
            messages = follow(messages, answer.text, text)
            answer = await client.both(messages)
            assert answer.route == "pull"
            pulled += answer.pulled
        assert pulled > 400
        after = [await metric(client, url, name) for url, name in watched]
        token_bytes = 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, size, bf16
        seen = [now - then for now, then in zip(after, before, strict=True)]
        # The first turn asks as well: somebody else may have begun in the same way.
        assert seen == [pulled * token_bytes, 3, 1, 2, pulled, 2, pulled]
        await until_nothing_is_held(client, claiming, "decode-0")
        assert await metric(client, d, "vllm:nixl_num_notifications_after_expiry_total") == 0


async def test_k01_an_edited_history(claiming: LocalCluster) -> None:
    async with router(claiming) as client:
        messages = opening()
        answer = await client.chat(messages)
        messages = follow(messages, answer.text, LONGER)
        answer = await client.chat(messages)
        edited = [*messages]
        edited[3] = {"role": "user", "content": LONGER.replace("sentence 6", "phrase 6")}
        answer = await client.both(follow(edited, answer.text, "Go on."))
        assert answer.route == "pull"


async def test_children_of_one_parent_read_at_the_same_time(claiming: LocalCluster) -> None:
    async with router(claiming) as client:
        messages = opening()
        answer = await client.chat(messages)
        children: list[list[dict[str, Any]]] = [
            follow(messages, answer.text, f"Child {number} asks.") for number in range(10)
        ]
        read = await asyncio.gather(*(client.chat(one, max_tokens=8) for one in children))
        assert [one.route for one in read] == ["pull"] * 10
        for number in (0, 9):
            cold = await client.chat(children[number], max_tokens=8, reuse="off")
            assert cold.text == read[number].text


async def test_k21_another_salt_reads_nothing(claiming: LocalCluster) -> None:
    async with router(claiming) as client:
        messages = opening()
        answer = await client.chat(messages, cache_salt="a")
        messages = follow(messages, answer.text, "Go on.")
        assert (await client.chat(messages, cache_salt="b")).route == "recompute"
        assert (await client.chat(messages, cache_salt="a")).route == "pull"


async def test_k09_d_killed_and_restarted(claiming: LocalCluster) -> None:
    async with router(claiming, probe_interval_s=0.5) as client:
        messages = opening()
        answer = await client.chat(messages)
        await claiming.kill("decode-0")
        await claiming.restart("decode-0")
        async with asyncio.timeout(60):
            while (await client.http.get(f"{client.url}/ready")).status != 200:
                await asyncio.sleep(0.1)
        messages = follow(messages, answer.text, "Go on.")
        answer = await client.both(messages)
        assert answer.route == "recompute"
        assert (await client.both(follow(messages, answer.text, "And?"))).route == "pull"


async def test_a_p_killed_while_it_reads_leaves_nothing_held(claiming: LocalCluster) -> None:
    async with router(claiming, probe_interval_s=0.5) as client:
        messages = opening()
        answer = await client.chat(messages)
        messages = follow(messages, answer.text, "Go on.")
        turns = [
            asyncio.create_task(
                client.post(
                    "/v1/chat/completions",
                    {"model": "smollm2", "messages": messages, "stream": True, "max_tokens": 4},
                )
            )
            for _ in range(4)
        ]
        await asyncio.sleep(0.2)  # somewhere within claim and read
        await claiming.kill("prefill-0")
        ended = await asyncio.gather(*turns)
        assert {one.status for one in ended} <= {200, 502, 503}
        await until_nothing_is_held(client, claiming, "decode-0")
        await claiming.restart("prefill-0")
        async with asyncio.timeout(60):
            while (await client.http.get(f"{client.url}/ready")).status != 200:
                await asyncio.sleep(0.1)
        assert (await client.both(messages)).route == "pull"
