"""What counts as the same distribution, what is asked of P, and when a pair is switched off."""

import asyncio
import json
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvloop.engines.client import EngineBrokenError, Reply
from kvloop.engines.pairs import Pairs
from kvloop.observe.metrics import Metrics
from kvloop.turn.bodies import PromptIds
from kvloop.turn.canary import Canary, divergence, first_token_logprobs
from kvloop.turn.plan import ProvenPrompt
from kvloop.turn.request import Api, TurnRequest
from tests.builders import FINGERPRINTER

P, D, OTHER = "http://p", "http://d", "http://d2"
PROMPT = ProvenPrompt(PromptIds([5, 6, 7]), FINGERPRINTER.prefixes([5, 6, 7]), [])


def text_answer(**tops: float) -> bytes:
    return json.dumps({"choices": [{"logprobs": {"top_logprobs": [tops]}}]}).encode()


RIGHT = text_answer(a=-0.5)


def to_come() -> asyncio.Future[Reply]:
    return asyncio.get_running_loop().create_future()


def given(status: int, body: bytes) -> asyncio.Future[Reply]:
    future = to_come()
    future.set_result(Reply(status, "application/json", body))
    return future


@dataclass
class ColdRuns:
    """P, as far as the canary sees it: gives the answers that were laid ready."""

    replies: list[asyncio.Future[Reply]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def post(self, url: str, path: str, body: bytes, headers: Any, **_: Any) -> Reply:
        assert (url, path) == (P, "/v1/completions")
        self.bodies.append(msgspec.json.decode(body))
        return await self.replies.pop(0)


def turn(api: Api = Api.COMPLETIONS, **fields: Any) -> TurnRequest:
    return TurnRequest(api, {"model": "m", "prompt": "x", **fields}, "turn-1")


@dataclass
class Bench:
    """A canary that looks at every turn, and what it works with."""

    cold: ColdRuns = field(default_factory=ColdRuns)
    pairs: Pairs = field(default_factory=Pairs)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.canary = Canary(1.0, 0.5, self.cold, self.pairs, self.metrics)  # type: ignore[arg-type]

    def begin(self, reply: asyncio.Future[Reply], pulled: bytes = RIGHT, decode: str = D) -> None:
        self.cold.replies.append(reply)
        self.canary.soon(turn(), PROMPT, pulled, P, decode)

    async def end(self) -> None:
        assert self.canary._running is not None
        await asyncio.wait([self.canary._running])

    async def check(self, apart: float, decode: str = D) -> None:
        """One whole check in which the two are so far apart."""
        self.begin(
            given(200, text_answer(a=-0.5 - apart, b=-9.0)), text_answer(a=-0.5, b=-9.0), decode
        )
        await self.end()

    def count(self, outcome: str) -> float:
        name = "kvloop_canary_checks_total"
        return self.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    @property
    def off(self) -> list[tuple[str, str]]:
        return [(prefill, decode) for prefill, decode, _ in self.pairs.switched_off()]


def test_noise_is_small_and_another_best_token_is_not() -> None:
    cold = {"a": -0.3, "b": -1.5, "c": -4.0}
    assert divergence({"a": -0.32, "b": -1.4, "d": -4.1}, cold) == pytest.approx(0.02)
    # Two nearly equal ones may change places.
    assert divergence({"a": -0.7, "b": -0.69}, {"a": -0.69, "b": -0.7}) == pytest.approx(0.01)
    assert divergence({"b": -0.1, "a": -3.0}, cold) == pytest.approx(2.7)


def test_a_best_token_that_the_other_does_not_list_has_there_at_most_what_the_listed_leave() -> (
    None
):
    sure = {"a": math.log(0.9), "b": math.log(0.09)}
    assert divergence({"x": -0.1}, sure) == pytest.approx(-0.1 - math.log(0.01))
    assert divergence({"x": -0.1}, {"a": 0.0}) == math.inf


def test_which_of_equally_likely_tokens_are_listed_is_chance() -> None:
    digits = {str(number): math.log(0.1) - number / 1000 for number in range(10)}
    one = dict(list(digits.items())[:5])
    other = {token: value + 0.005 for token, value in list(digits.items())[5:]}
    assert divergence(one, other) < 0.02


def test_a_drawn_token_that_is_none_of_the_best_bounds_nothing() -> None:
    cold = {f"c{number}": -2.0 for number in range(5)}
    pulled = {**{f"p{number}": -2.05 for number in range(4)}, "drawn": -12.0}
    assert divergence(pulled, cold) < 0.1


def test_nothing_to_compare_is_not_agreement() -> None:
    with pytest.raises(ValueError, match="no log-prob"):
        divergence({}, {"a": 0.0})


def test_both_apis_say_it_in_their_own_way() -> None:
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -2}]
    chat = {"choices": [{"logprobs": {"content": [{"token": "a", "top_logprobs": top}]}}]}
    wanted = {"a": -0.5, "b": -2.0}
    assert first_token_logprobs(Api.CHAT, json.dumps(chat).encode()) == wanted
    assert first_token_logprobs(Api.COMPLETIONS, text_answer(**wanted)) == wanted


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": [{"logprobs": null}]}'])
def test_an_answer_without_them_is_an_error(body: bytes) -> None:
    for api in Api:
        with pytest.raises(ValueError, match="no log-prob"):
            first_token_logprobs(api, body)


async def test_the_cold_run_uses_and_fills_no_cache_and_pins_nothing() -> None:
    bench = Bench()
    for _ in range(2):
        await bench.check(0.0)
    first, second = bench.cold.bodies
    assert first["prompt"] == [5, 6, 7]
    assert "kv_transfer_params" not in first
    assert first["cache_salt"] != second["cache_salt"]
    assert (first["max_tokens"], first["temperature"]) == (1, 0)


@pytest.mark.parametrize("api", list(Api))
async def test_both_runs_name_tokens_alike_whatever_the_client_wants(api: Api) -> None:
    bench = Bench()
    await bench.check(0.0)
    asked = bench.canary.asked_of_p(turn(api, return_tokens_as_token_ids=False, temperature=1.5))
    for name in ("temperature", "return_tokens_as_token_ids"):
        assert asked[name] == bench.cold.bodies[0][name]
    assert asked["return_tokens_as_token_ids"] is True


async def test_one_mild_divergence_is_chance_and_two_are_not() -> None:
    bench = Bench()
    await bench.check(0.6)
    for _ in range(10):
        await bench.check(0.1)
    await bench.check(0.6, decode=OTHER)  # another pair's business
    assert bench.off == []
    await bench.check(0.6)
    assert bench.off == [(P, D)]
    assert (bench.count("agreed"), bench.count("diverged")) == (10, 3)


async def test_a_mild_divergence_is_forgotten_in_the_end() -> None:
    bench = Bench()
    await bench.check(0.6)
    for _ in range(20):
        await bench.check(0.1)
    await bench.check(0.6)
    assert bench.off == []


async def test_one_gross_divergence_is_enough_and_after_a_reset_counting_begins_anew() -> None:
    bench = Bench()
    await bench.check(2.1)
    assert bench.off == [(P, D)]
    bench.pairs.reset(P, D)
    await bench.check(0.6)
    assert bench.off == []


@pytest.mark.parametrize("engine", [P, D])
async def test_a_restart_ends_the_check_that_runs_and_clears_what_was_seen(engine: str) -> None:
    bench = Bench()
    await bench.check(0.6)
    bench.begin(to_come())
    await asyncio.sleep(0)  # it has begun
    bench.canary.restarted(engine)
    await bench.end()
    await bench.check(0.6)
    assert bench.off == []
    bench.canary.restarted(OTHER)
    await bench.check(0.6)
    assert bench.off == [(P, D)]


async def test_one_at_a_time_and_what_comes_meanwhile_is_dropped() -> None:
    bench = Bench()
    later = to_come()
    bench.begin(later)
    bench.canary.soon(turn(), PROMPT, RIGHT, P, D)
    assert bench.count("dropped") == 1
    later.set_result(Reply(200, "application/json", RIGHT))
    await bench.end()
    assert (bench.count("agreed"), len(bench.cold.bodies)) == (1, 1)


async def test_what_cannot_be_compared_is_counted_and_no_alarm() -> None:
    bench = Bench()
    broken = to_come()
    broken.set_exception(EngineBrokenError(P, "gone"))
    for reply in (broken, given(400, RIGHT), given(200, b"{}")):
        bench.begin(reply)
        await bench.end()
    bench.begin(given(200, RIGHT), pulled=b"{}")
    await bench.end()
    assert (bench.count("failed"), bench.off) == (4, [])


async def test_at_shutdown_a_check_that_runs_is_ended() -> None:
    bench = Bench()
    await bench.canary.close()
    later = to_come()
    bench.begin(later)
    await asyncio.sleep(0)  # it has begun
    await bench.canary.close()
    assert later.cancelled()
