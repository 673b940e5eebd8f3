"""The breaker: opens after failures in a row, lets one try, waits longer each time."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.engines.breaker import Breaker, BreakerState


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(max_failures=3, first_pause_s=1.0, longest_pause_s=4.0)
    for _ in range(3):
        breaker.began(now_s)
        breaker.failed(now_s)
    return breaker


def test_failures_in_a_row_open_it_and_scattered_ones_do_not() -> None:
    assert opened().state(0.5) is BreakerState.OPEN
    breaker = Breaker(max_failures=3)
    for _ in range(10):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.accepts(0.0)


def test_after_the_pause_one_may_try() -> None:
    breaker = opened()
    assert not breaker.accepts(0.9)
    assert breaker.wait_s(0.25) == 0.75
    assert breaker.accepts(1.0)
    breaker.began(1.0)
    assert not breaker.accepts(1.0)


def test_a_trial_that_succeeds_closes_it_for_all() -> None:
    breaker = opened()
    breaker.began(1.0)
    breaker.succeeded()
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_a_trial_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now_s = opened(), 0.0
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        assert not breaker.accepts(now_s + pause_s - 0.01)
        now_s += pause_s
        assert breaker.accepts(now_s)
        breaker.began(now_s)
        breaker.failed(now_s)


def test_a_trial_whose_client_left_frees_the_place_of_the_next() -> None:
    breaker = opened()
    breaker.began(1.0)
    breaker.undecided()
    assert breaker.accepts(1.0)


def test_only_statuses_that_say_that_it_cannot_serve_count() -> None:
    breaker = Breaker(max_failures=2)
    for status in (500, 400, 404, 500, 500, 429):
        breaker.answered(status, 0.0)
    assert breaker.accepts(0.0)
    breaker.answered(503, 0.0)
    breaker.answered(502, 0.0)
    assert not breaker.accepts(0.0)


def test_late_failures_of_requests_sent_before_it_opened_do_not_lengthen_the_pause() -> None:
    breaker = opened()
    for _ in range(10):
        breaker.failed(0.5)
    assert breaker.accepts(1.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["began", "ok", "bad", "left"]), st.floats(0, 5)), max_size=60
    )
)
def test_it_never_stays_shut_for_ever(steps: list[tuple[str, float]]) -> None:
    breaker, now_s = Breaker(2, 1.0, 8.0), 0.0
    for step, pause_s in steps:
        now_s += pause_s
        match step:
            case "began":
                breaker.began(now_s)
            case "ok":
                breaker.succeeded()
            case "bad":
                breaker.failed(now_s)
            case "left":
                breaker.undecided()
    breaker.undecided()
    assert breaker.accepts(now_s + 8.0)
