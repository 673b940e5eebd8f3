"""Deadlines: never later than D frees the blocks, whatever delayed the answer."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.ledger.deadline import WINDOW_S, DeadlineClock

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
    st.lists(st.tuples(st.floats(0, 200), st.floats(0, 390)), min_size=1, max_size=20),
)
def test_a_deadline_is_never_later_than_now_plus_ttl_and_improves_with_samples_of_late(
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


def test_clocks_that_drift_apart_do_not_end_references_early() -> None:
    clock = DeadlineClock(TTL_S, MARGIN_S)
    for minute in range(0, 60 * 24 * 60, 5):  # two months
        now_s = minute * 60.0
        d_now_s = D_CLOCK_AHEAD_S + now_s * (1 - 100e-6)
        deadline_s = clock.deadline_s("d", d_now_s + TTL_S, now_s)
        assert 0 <= now_s + TTL_S - MARGIN_S - deadline_s <= 2 * WINDOW_S * 100e-6 + 1e-3


def test_samples_of_engines_that_are_gone_do_not_pile_up() -> None:
    clock = DeadlineClock(TTL_S, MARGIN_S)
    for number in range(5000):
        clock.deadline_s(f"life-{number}", 1000.0, float(number))
    assert len(clock._offsets) <= 1024
