"""Deadlines: never later than D frees the blocks, whatever delayed the answer."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.ledger.deadline import DeadlineClock

TTL_S, MARGIN_S = 480.0, 15.0
D_CLOCK_AHEAD_S = 123_456.0


def test_without_an_expiry_the_ttl_counts_from_now() -> None:
    assert DeadlineClock(TTL_S, MARGIN_S).deadline_s("d", None, 100.0) == 100.0 + TTL_S - MARGIN_S


def test_an_answer_that_reached_us_late_does_not_live_longer() -> None:
    clock = DeadlineClock(TTL_S, MARGIN_S)
    clock.deadline_s("d", 10.0 + D_CLOCK_AHEAD_S + TTL_S, 10.0)  # at once
    late = clock.deadline_s("d", 20.0 + D_CLOCK_AHEAD_S + TTL_S, 320.0)  # 300 s late
    assert late == 20.0 + TTL_S - MARGIN_S


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 400)), min_size=1, max_size=20),
)
def test_a_deadline_is_never_later_than_now_plus_ttl_and_improves_with_samples(
    turns: list[tuple[float, float]],
) -> None:
    clock = DeadlineClock(TTL_S, MARGIN_S)
    best_delay = float("inf")
    for finished_s, delay_s in turns:
        best_delay = min(best_delay, delay_s)
        deadline = clock.deadline_s("d", finished_s + D_CLOCK_AHEAD_S + TTL_S, finished_s + delay_s)
        assert abs(deadline - (finished_s + best_delay + TTL_S - MARGIN_S)) < 1e-6


def test_another_engine_has_its_own_clock() -> None:
    clock = DeadlineClock(TTL_S, MARGIN_S)
    clock.deadline_s("old", 1_000_000.0, 0.0)
    assert clock.deadline_s("new", 5_000_000.0, 50.0) == 50.0 + TTL_S - MARGIN_S


def test_a_forgotten_engine_starts_anew() -> None:
    clock = DeadlineClock(TTL_S, MARGIN_S)
    clock.deadline_s("d", 1000.0, 0.0)
    clock.forget("d")
    assert clock.deadline_s("d", 9.0, 50.0) == 50.0 + TTL_S - MARGIN_S
