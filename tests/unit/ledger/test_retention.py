"""How much D should give back, and what first."""

from kvloop.ledger.retention import RetentionOrder, tokens_over


def test_first_turns_go_before_conversations_that_went_on_and_the_oldest_first() -> None:
    order = RetentionOrder()
    order.add(1, 10, continued=True)
    order.add(2, 10, continued=False)
    order.add(3, 10, continued=False)
    order.add(4, 10, continued=True)
    assert order.victims(10) == [2]
    assert order.victims(25) == [2, 3, 1]
    assert order.victims(1000) == [2, 3, 1, 4]
    order.discard(3)
    order.discard(1)
    assert order.victims(1000) == [2, 4]
    assert order.victims(0) == []


def test_within_the_budget_nothing_goes() -> None:
    assert over(pinned=500) == 0
    assert over(pinned=501) == 1
    assert over(pinned=800) == 300


def test_k12_requests_that_wait_for_memory_do_not_wait_for_deadlines() -> None:
    assert over(pinned=400, usage=0.95, waiting=1) == 150
    assert over(pinned=100, usage=0.95, waiting=1) == 100
    assert over(pinned=400, usage=0.7, waiting=1) == 100
    assert over(pinned=400, usage=0.95, waiting=0) == 0
    assert over(pinned=400, usage=0.48, waiting=1, longest=600) == 100


def test_requests_that_wait_for_something_else_than_memory_cost_no_pins() -> None:
    assert over(pinned=400, usage=0.48, waiting=9, longest=500) == 0
    assert over(pinned=400, usage=0.48, waiting=9, longest=521) == 100


def over(*, pinned: int, usage: float = 0.0, waiting: int = 0, longest: int = 1000) -> int:
    return tokens_over(
        capacity=1000,
        budget_share=0.5,
        pinned=pinned,
        usage=usage,
        waiting=waiting,
        longest=longest,
    )
