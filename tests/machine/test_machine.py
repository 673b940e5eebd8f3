"""The state machine: many turns through the router, whatever happens to the engines."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.machine.run import STEPS_PER_WORLD, Failure, attempt, run_world, shrink
from tests.machine.search import report, search

TURNS = 100_000


@pytest.mark.timeout(3600)
def test_every_invariant_holds_in_every_world(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with capsys.disabled():
        found = search(1, TURNS, None, os.cpu_count() or 1)
        report(found)
    assert found.failure is None, str(shrink(found.failure))
    seen = found.tally
    # It would be no proof if it did not get to see things.
    assert found.tally.right > 0.9 * TURNS
    assert seen.routes["pull"] > 0.1 * TURNS
    assert seen.whys["claim"] > 0.01 * TURNS
    for why in ("pull_refused", "below_threshold", "tokens_unknown", "claim_miss"):
        assert seen.whys[why] > 0, why
    for status in (500, 502, 503, 504):
        assert seen.statuses[status] > 0, status


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    steps=st.lists(st.integers(0, STEPS_PER_WORLD - 1), max_size=60, unique=True).map(sorted),
)
def test_any_choice_of_steps_of_any_world_holds(seed: int, steps: list[int]) -> None:
    result = attempt(seed, steps)
    assert not isinstance(result, Failure), str(result)


def test_a_run_is_the_same_each_time() -> None:
    steps = list(range(120))
    assert run_world(5, steps) == run_world(5, steps)
