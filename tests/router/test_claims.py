"""Claim mode: P asks D's by block hash; nothing is pinned between turns."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from tests.double.http import kill, revive, until
from tests.router.stack import Stack, follow, opening, stack


@asynccontextmanager
async def claiming(**more: Any):  # type: ignore[no-untyped-def]
    async with stack(**more) as s:
        for engine in (*s.prefills, *s.decodes):
            engine.claims = True
            engine.restart()  # whoever looks again sees it
        await until(lambda: all(_claims(one) for one in s.router.services.fleet.engines))
        yield s


def _claims(engine: Any) -> bool:
    return bool(engine.usable and engine.facts.claims)


def _nothing_is_pinned(s: Stack) -> bool:
    return all(engine.pinned_blocks == 0 for engine in (*s.prefills, *s.decodes))


async def test_the_history_is_read_by_claim_on_every_turn_after_the_first() -> None:
    async with claiming() as s:
        messages = opening()
        answer = await s.chat(messages)
        assert answer.route == "recompute"
        assert "claim_miss" in answer.headers["x-kvloop-route"]
        for _ in range(4):
            messages = follow(messages, answer.text)
            answer = await s.chat(messages)
            assert answer.route == "pull"
            assert answer.pulled > 100
            assert b"kvloop" not in answer.body
        await until(lambda: _nothing_is_pinned(s))
        assert s.router.services.pins.tokens(s.router.services.fleet.decodes[0].url) == 0


async def test_edited_histories_read_what_is_equal_and_no_more() -> None:
    async with claiming() as s:
        messages = opening()
        first = await s.chat(messages)
        messages = follow(messages, first.text, "Then tell me more, and at length. " * 6)
        second = await s.chat(messages)
        edited = [*messages]
        edited[3] = {"role": "user", "content": messages[3]["content"][:100] + "Something else."}
        answer = await s.chat(follow(edited, second.text))
        assert answer.route == "pull"


async def test_ten_children_of_one_parent_all_read() -> None:
    async with claiming() as s:
        messages = opening()
        first = await s.chat(messages)
        turns = [s.chat(follow(messages, first.text, f"Branch {n}.")) for n in range(10)]
        answers = await asyncio.gather(*turns)
        assert [answer.route for answer in answers] == ["pull"] * 10


async def test_conversations_that_share_only_a_system_prompt_share_its_kv() -> None:
    async with claiming() as s:
        system = "You are careful and thorough in all that you do. " * 6
        await s.chat(opening("One thing.", system))
        answer = await s.chat(opening("Another matter entirely.", system))
        assert answer.route == "pull"


async def test_salts_and_adapters_are_in_the_hashes() -> None:
    async with claiming() as s:
        messages = opening()
        await s.chat(messages, cache_salt="one")
        other = await s.chat(messages, cache_salt="two")
        assert other.route == "recompute"
        again = await s.chat(messages, cache_salt="one")
        assert again.route == "pull"


async def test_what_d_has_evicted_is_computed() -> None:
    async with claiming(num_blocks=60) as s:
        messages = opening()
        first = await s.chat(messages)
        for n in range(6):
            await s.chat(opening(f"Something else, number {n}."))
        assert (await s.chat(follow(messages, first.text))).route == "recompute"


async def test_idle_conversations_do_not_keep_others_waiting() -> None:
    async with claiming(num_blocks=60) as s:
        for n in range(50):
            await s.chat(opening(f"Conversation {n}."))
        async with asyncio.timeout(10):
            await s.chat(opening("And a long one."), max_tokens=400)


async def test_with_two_d_the_conversation_s_home_is_asked_wherever_the_turn_goes() -> None:
    async with claiming(decodes=2) as s:
        conversations = [opening(f"Conversation {n}.") for n in range(4)]
        firsts = [await s.chat(messages) for messages in conversations]
        for messages, first in zip(conversations, firsts, strict=True):
            assert (await s.chat(follow(messages, first.text))).route == "pull"


async def test_k09_a_holder_that_is_gone_costs_nothing_but_the_reuse() -> None:
    async with claiming(decodes=2) as s:
        messages = opening()
        first = await s.chat(messages)
        home = next(engine for engine in s.decodes if engine.requests)
        await kill(home)
        answer = await s.chat(follow(messages, first.text))
        assert answer.route == "recompute"
        await revive(home)


async def test_a_p_that_fails_a_claimed_read_is_asked_again_cold() -> None:
    async with claiming() as s:
        messages = opening()
        first = await s.chat(messages)
        s.prefill.refuse_next = [500]
        answer = await s.chat(follow(messages, first.text))
        assert answer.route == "recompute"
        assert "pull_refused" in answer.headers["x-kvloop-route"]


async def test_reuse_off_asks_nobody() -> None:
    async with claiming() as s:
        messages = opening()
        await s.chat(messages)
        await s.chat(messages, headers={"x-kvloop-reuse": "off"})
        assert "kvloop_claim_holders" not in s.prefill.requests[-1].body["kv_transfer_params"]


async def test_a_pinning_d_and_a_claiming_p_still_loop() -> None:
    async with stack() as s:
        s.prefill.claims = True
        s.prefill.restart()
        await until(lambda: _claims(s.router.services.fleet.prefills[0]))
        messages = opening()
        first = await s.chat(messages)
        assert (await s.chat(follow(messages, first.text))).route == "pull"
        assert s.decode.pinned_blocks > 0


async def test_the_ledger_keeps_one_home_for_each_conversation() -> None:
    async with claiming() as s:
        messages = opening()
        for _ in range(5):
            messages = follow(messages, (await s.chat(messages)).text)
        assert len(s.router.services.ledger) == 1
