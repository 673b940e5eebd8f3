"""Invariant 1 and 2 on real engines: with reuse, the answer is that of a run without it."""

from typing import Any

from kvloop.cluster import LocalCluster
from kvloop.proof.trim import trim
from tests.contract.engines import TOKEN_BYTES
from tests.engines.client import follow, metric, opening, until_nothing_is_pinned
from tests.engines.conftest import DECODER_TTL_S, router

LONGER = " ".join(f"Also, sentence {i} says that the water is {i} degrees." for i in range(1, 9))


async def test_k23_a_conversation_is_pulled_and_the_bytes_moved_are_those_that_we_count(
    cluster: LocalCluster,
) -> None:
    async with router(cluster) as client:
        url, name = cluster.url("prefill-0"), "vllm:nixl_bytes_transferred_sum"
        before = await metric(client.http, url, name)
        messages = opening()
        answer = await client.both(messages)
        pulled = 0
        for text in ("And what else?", "Why is that?"):
            messages = follow(messages, answer.text, text)
            answer = await client.both(messages)
            assert answer.route == "pull"
            pulled += answer.pulled
        moved = await metric(client.http, url, name) - before
        assert pulled > 400
        assert moved == pulled * TOKEN_BYTES


async def test_k01_an_edited_history(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        messages = opening()
        answer = await client.chat(messages)
        messages = follow(messages, answer.text, LONGER)
        answer = await client.chat(messages)
        edited = [*messages]
        edited[3] = {"role": "user", "content": LONGER.replace("sentence 5", "phrase fifty")}
        branch = await client.both(follow(edited, answer.text, "What changed?"))
        assert branch.route == "pull"


async def test_k01_a_stripped_middle(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        messages = opening()
        answer = await client.chat(messages)
        messages = follow(messages, answer.text, LONGER)
        answer = await client.chat(messages)
        messages = follow(messages, answer.text, "Go on.")
        stripped = [*messages[:2], *messages[4:]]
        assert (await client.both(stripped)).route == "pull"


async def test_k03_a_branch_and_a_shorter_prompt(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        messages = opening()
        answer = await client.chat(messages)
        longer = follow(messages, answer.text, LONGER)
        await client.chat(longer)
        assert (await client.both(messages)).route == "pull"  # D holds more than this prompt
        await client.both(follow(messages, answer.text, "Something else: name a lake."))


async def test_k07_the_same_turn_again(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        messages = opening()
        answer = await client.chat(messages)
        turn = follow(messages, answer.text, "And then?")
        first = await client.both(turn)
        second = await client.both(turn)
        assert first.route == "pull"
        assert first.text == second.text


async def test_k06_a_reference_that_d_has_let_expire_costs_a_retry_and_no_answer(
    cluster: LocalCluster,
) -> None:
    """The router is told a TTL ten times too long, so it is P that refuses."""
    async with router(cluster, kv_ttl_s=DECODER_TTL_S * 10.0) as client:
        messages = opening()
        answer = await client.chat(messages)
        await until_nothing_is_pinned(client.http, cluster.url("decode-0"))
        late = await client.both(follow(messages, answer.text, "Still there?"))
        assert (late.route, late.why) == ("recompute", "pull_refused")


async def test_k21_another_salt_shares_nothing(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        messages = opening()
        answer = await client.chat(messages)
        other = await client.both(follow(messages, answer.text, "Go on."), cache_salt="other")
        assert other.route == "recompute"


async def test_completions_and_whole_answers_loop_too(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        prompt = " ".join(message["content"] for message in opening("lakes"))
        body: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "max_tokens": 16}
        body |= {"temperature": 0, "stream": True}
        first = await client.post("/v1/completions", body)
        body["prompt"] = prompt + first.text + " Therefore, in the end,"
        again = await client.post("/v1/completions", body)
        off = await client.post(
            "/v1/completions", {**body, "cache_salt": "off"}, **{"x-kvloop-reuse": "off"}
        )
        assert again.route == "pull"
        assert again.text == off.text


async def test_a_release_without_a_read_frees_the_pin(cluster: LocalCluster) -> None:
    async with router(cluster) as client:
        await client.chat(opening(), reuse="off")  # D pins it; the router gives it back
        await until_nothing_is_pinned(client.http, cluster.url("decode-0"))


async def test_without_the_proof_the_engine_itself_answers_wrongly(cluster: LocalCluster) -> None:
    """What the guard is for: the engine takes another conversation's KV and says 200.

    If this fails, vLLM has learned to compare, and the other tests have lost their meaning.
    """
    prefill, decode = cluster.url("prefill-0"), cluster.url("decode-0")
    async with router(cluster) as client:
        url = "/v1/chat/completions"
        one, other = opening("rivers"), opening("the history of the bicycle and its inventors")
        right = await client.chat(other, reuse="off")

        async def leg(engine: str, messages: Any, max_tokens: int, params: Any) -> Any:
            body = {"model": "smollm2", "messages": messages, "max_tokens": max_tokens}
            body |= {"temperature": 0, "kv_transfer_params": params}
            async with client.http.post(engine + url, json=body) as response:
                assert response.status == 200
                return await response.json()

        cold = {"do_remote_decode": True, "do_remote_prefill": False}
        prefilled = await leg(prefill, one, 1, cold)
        answered = await leg(decode, one, 16, prefilled["kv_transfer_params"])
        reference = answered["kv_transfer_params"]
        num_tokens = min(reference["remote_num_tokens"], least_tokens(other)) // 32 * 32
        wrong = trim(reference, num_tokens, 32)
        prefilled = await leg(prefill, other, 1, {**wrong, **cold})
        answered = await leg(decode, other, 16, prefilled["kv_transfer_params"])
        assert answered["choices"][0]["message"]["content"] != right.text


def least_tokens(messages: list[dict[str, Any]]) -> int:
    """A safe lower bound of the prompt's tokens: a token has at most 8 characters here."""
    return sum(len(message["content"]) for message in messages) // 8
