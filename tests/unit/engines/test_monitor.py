"""The monitor's judgement: busy is not gone, gone is gone at once."""

import asyncio

import pytest

from kvloop.engines.client import EngineTimeoutError, EngineUnreachableError, Reply
from kvloop.engines.fleet import Engine, Fleet, Role
from kvloop.engines.monitor import probe, watch
from tests.machine import virtual_time
from tests.unit.engines.test_facts import METRICS, MODELS, VERSION


class Answers:
    """An engine client whose engine is as its attributes say."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.health = 200
        self.metrics = METRICS

    async def get(self, url: str, path: str, *, timeout_s: float) -> Reply:
        if self.fails is not None:
            raise self.fails
        body = {"/metrics": self.metrics, "/v1/models": MODELS, "/version": VERSION}.get(path, b"")
        return Reply(self.health if path == "/health" else 200, "text/plain", body)

    async def post(
        self, url: str, path: str, body: bytes, headers: dict[str, str], *, timeout_s: float
    ) -> Reply:
        return Reply(400, "application/json", b"{}")


@pytest.fixture
def engine() -> Engine:
    return Engine("http://p", Role.PREFILL)


async def look(engine: Engine, answers: Answers) -> bool:
    return await probe(engine, answers)  # type: ignore[arg-type]


async def test_a_healthy_engine_becomes_usable_with_its_facts(engine: Engine) -> None:
    assert not engine.usable
    assert await look(engine, Answers()) is False
    assert engine.usable
    assert engine.facts is not None
    assert engine.facts.renders


async def test_a_busy_engine_stays_usable_and_one_that_hangs_does_not(engine: Engine) -> None:
    answers = Answers()
    await look(engine, answers)
    answers.fails = EngineTimeoutError("http://p", "did not answer in time")
    for _ in range(3):
        await look(engine, answers)
        assert engine.usable
    await look(engine, answers)
    assert not engine.usable


async def test_an_answer_in_time_forgives_late_ones(engine: Engine) -> None:
    answers = Answers()
    await look(engine, answers)
    for _ in range(5):
        answers.fails = EngineTimeoutError("http://p", "did not answer in time")
        await look(engine, answers)
        answers.fails = None
        await look(engine, answers)
        assert engine.usable


@pytest.mark.parametrize("failure", [EngineUnreachableError("http://p", "refused"), None])
async def test_an_engine_that_is_gone_or_ill_is_not_used(
    engine: Engine, failure: Exception | None
) -> None:
    answers = Answers()
    await look(engine, answers)
    answers.fails = failure
    answers.health = 503
    await look(engine, answers)
    assert not engine.usable
    assert engine.trouble


async def test_k09_another_process_at_the_same_address_is_noticed(engine: Engine) -> None:
    answers = Answers()
    await look(engine, answers)
    answers.metrics = METRICS.replace(b"1.7e+09", b"1.8e+09")
    assert await look(engine, answers) is True
    assert await look(engine, answers) is False


def test_an_engine_that_is_back_is_soon_seen(engine: Engine) -> None:
    answers = Answers()
    answers.fails = EngineUnreachableError("http://p", "refused")

    async def main() -> None:
        fleet = Fleet(prefills=(engine,), decodes=())
        watching = asyncio.create_task(
            watch(fleet, answers, interval_s=60.0, on_usable=lambda *_: None)  # type: ignore[arg-type]
        )
        await asyncio.sleep(10.0)
        answers.fails = None
        await asyncio.sleep(1.0)
        assert engine.usable
        watching.cancel()

    virtual_time.run(main())
