"""Pairs between which pulls fail, or whose answers diverged, do not pull."""

from kvloop.engines.pairs import Pairs


def failing(pairs: Pairs, prefill: str, decode: str, now_s: float) -> None:
    for _ in range(3):
        pairs.breaker(prefill, decode).began(now_s)
        pairs.breaker(prefill, decode).failed(now_s)


def test_pulls_that_fail_again_and_again_bar_their_pair_only_and_for_a_while() -> None:
    pairs = Pairs()
    failing(pairs, "p0", "d0", 10.0)
    assert pairs.barred("p0", 10.0) == {"d0"}
    assert pairs.barred("p1", 10.0) == frozenset()
    assert pairs.barred("p0", 15.0) == frozenset()


def test_a_pair_that_is_switched_off_stays_so_until_it_is_reset() -> None:
    pairs = Pairs()
    pairs.switch_off("p0", "d0", "answers diverged")
    assert pairs.barred("p0", 1e9) == {"d0"}
    assert list(pairs.switched_off()) == [("p0", "d0", "answers diverged")]
    assert pairs.reset("p0", "d0")
    assert pairs.barred("p0", 0.0) == frozenset()
    assert not pairs.reset("p0", "d0")


def test_a_restart_of_either_clears_it() -> None:
    for engine in ("p0", "d0"):
        pairs = Pairs()
        pairs.switch_off("p0", "d0", "answers diverged")
        pairs.switch_off("p1", "d1", "answers diverged")
        pairs.restarted(engine)
        assert [pair[:2] for pair in pairs.switched_off()] == [("p1", "d1")]
