"""The canary: finds KV that is not the prompt's, and keeps quiet about KV that is."""

from typing import Any

from tests.double.http import until
from tests.router.stack import Stack, follow, opening, stack


def checks(s: Stack, outcome: str) -> float:
    value = s.router.services.metrics.registry.get_sample_value(
        "kvloop_canary_checks_total", {"outcome": outcome}
    )
    return value or 0.0


def alarms(s: Stack) -> list[Any]:
    return list(s.router.services.pairs.switched_off())


async def two_turns(s: Stack, topic: str, **fields: Any) -> str:
    """A conversation's two first turns; how the second was routed."""
    messages = opening(topic)
    first = await s.chat(messages, right=False, **fields)
    return (await s.chat(follow(messages, first.text), right=False, **fields)).route


async def test_off_unless_asked_for() -> None:
    async with stack() as s:
        assert await two_turns(s, "one") == "pull"
        assert all("logprobs" not in request.body for request in s.prefill.requests)


async def test_what_agrees_raises_no_alarm_and_costs_the_turn_nothing() -> None:
    async with stack(settings={"canary_share": 1.0}) as s:
        messages = opening()
        first = await s.chat(messages)
        second = await s.chat(follow(messages, first.text))
        assert second.route == "pull"
        assert b'logprobs":{' not in second.body
        await until(lambda: checks(s, "agreed") == 1)
        prompt = [ord("x")] * 200
        answer = await s.completion(prompt)
        await s.completion(prompt + [ord(one) for one in answer.text] + [ord("y")] * 20)
        await until(lambda: checks(s, "agreed") == 2)
        assert alarms(s) == []
        assert s.prefill.pinned_blocks == 0 or s.decode.pinned_blocks > 0


async def test_k08_reads_that_arrive_as_something_else_switch_their_pair_off() -> None:
    async with stack(prefills=2, settings={"canary_share": 1.0}) as s:
        s.prefills[0].spoils_reads = True  # with 200, and nobody is told
        await s.chat(opening("so that the first P has the second turns"), right=False)
        await two_turns(s, "a topic")
        await until(lambda: alarms(s))
        ((prefill, decode, why),) = alarms(s)
        assert prefill == s.router.settings.prefill[0]
        assert decode == s.router.settings.decode[0]
        assert "nats" in why
        alarm = f'kvloop_reuse_off{{decode="{decode}",prefill="{prefill}"}} 1.0'
        assert alarm in await (await s.http.get(f"{s.admin_url}/metrics")).text()
        s.fabric.now_s += 10_000.0  # no pause ends it
        pulled_by = len(s.fabric.handovers)
        assert await two_turns(s, "later") == "recompute"
        await s.chat(opening("the other P's turn"))
        assert await two_turns(s, "later still") == "pull"
        assert len(s.fabric.handovers) > pulled_by
        pair = {"prefill": prefill, "decode": decode}
        async with s.http.post(f"{s.admin_url}/pairs/reset", json=pair) as response:
            assert (await response.json())["reset"] is True
        assert alarms(s) == []
        assert alarm not in await (await s.http.get(f"{s.admin_url}/metrics")).text()
        async with s.http.post(f"{s.admin_url}/pairs/reset", data=b"nonsense") as response:
            assert response.status == 400


async def test_the_sample_is_by_request_id() -> None:
    async with stack(settings={"canary_share": 0.3}) as s:
        canary = s.router.services.canary
        drawn = [canary.wants(f"turn-{number}") for number in range(2000)]
        assert drawn == [canary.wants(f"turn-{number}") for number in range(2000)]
        assert 450 < sum(drawn) < 750
