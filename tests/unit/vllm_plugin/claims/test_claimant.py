"""The claimant: waits no longer than it said, keeps the best grant, gives everything back."""

from kvloop.vllm_plugin.claims.claimant import Address, Claimant, Granted, Refused
from kvloop.vllm_plugin.claims.messages import Claim, Done, Grant, Message, Refuse, Renew
from tests.unit.vllm_plugin.claims.builders import TERMS, hashes

D0: Address = ("d0", 6600)
D1: Address = ("d1", 6600)


class Sent(list[tuple[Address, Message]]):
    """What went out."""

    def __call__(self, address: Address, message: Message) -> None:
        self.append((address, message))

    def claim_id(self, address: Address) -> bytes:
        return next(
            message.claim_id
            for to, message in reversed(self)
            if to == address and isinstance(message, Claim)
        )

    def done(self) -> list[Address]:
        return [to for to, message in self if isinstance(message, Done)]


def asking(*holders: Address) -> tuple[Claimant, Sent]:
    sent = Sent()
    claimant = Claimant("engine-p", TERMS, sent, deadline_s=0.5, lease_s=6.0)
    claimant.ask("request", holders, 2, hashes(1, 2, 3), 0.0)
    return claimant, sent


def grant(claim_id: bytes, num_blocks: int, lease_ms: int = 6000) -> Grant:
    blocks = [list(range(num_blocks))]
    return Grant(claim_id, "engine-d", "host", 5601, 1, 1, 1, blocks, lease_ms)


def test_a_grant_is_what_may_be_read() -> None:
    claimant, sent = asking(D0)
    assert claimant.outcome("request", 0.1) is None
    claimant.received(D0, grant(sent.claim_id(D0), 3), 0.2)
    outcome = claimant.outcome("request", 0.2)
    assert isinstance(outcome, Granted)
    assert (outcome.first, outcome.end, outcome.claim_s) == (2, 5, 0.2)
    claimant.over("request")
    assert sent.done() == [D0]
    assert len(claimant) == 0


def test_no_answer_in_time_is_a_refusal_and_a_late_grant_is_given_back() -> None:
    claimant, sent = asking(D0)
    assert claimant.outcome("request", 0.5) == Refused(("timeout",))
    assert sent.done() == [D0]
    claimant.received(D0, grant(sent.claim_id(D0), 3), 0.6)
    assert sent.done() == [D0, D0]
    assert len(claimant) == 0


def test_a_request_that_is_gone_gives_back_what_it_was_or_will_be_granted() -> None:
    claimant, sent = asking(D0, D1)
    claimant.received(D0, grant(sent.claim_id(D0), 3), 0.1)
    claimant.over("request")
    assert sorted(sent.done()) == [D0, D1]
    claimant.received(D1, grant(sent.claim_id(D1), 3), 0.2)
    assert sorted(sent.done()) == [D0, D1, D1]


def test_the_longest_grant_wins_and_the_other_is_given_back_at_once() -> None:
    for first, second, kept in ((1, 3, D1), (3, 1, D0), (2, 2, D0)):
        claimant, sent = asking(D0, D1)
        claimant.received(D0, grant(sent.claim_id(D0), first), 0.1)
        assert claimant.outcome("request", 0.1) is None  # the other may have more
        claimant.received(D1, grant(sent.claim_id(D1), second), 0.1)
        assert isinstance(claimant.outcome("request", 0.1), Granted)
        assert sent.done() == [D1 if kept is D0 else D0]
        claimant.over("request")
        assert sorted(sent.done()) == [D0, D1]


def test_one_grant_is_enough_when_the_others_refuse_or_time_out() -> None:
    claimant, sent = asking(D0, D1)
    claimant.received(D0, Refuse(sent.claim_id(D0), "miss"), 0.1)
    claimant.received(D1, grant(sent.claim_id(D1), 2), 0.1)
    assert isinstance(claimant.outcome("request", 0.1), Granted)
    claimant, sent = asking(D0, D1)
    claimant.received(D1, grant(sent.claim_id(D1), 2), 0.1)
    assert isinstance(claimant.outcome("request", 0.5), Granted)
    assert sent.done() == [D0]


def test_refusals_are_told_with_their_reasons_as_soon_as_all_are_in() -> None:
    claimant, sent = asking(D0, D1)
    claimant.received(D0, Refuse(sent.claim_id(D0), "miss"), 0.1)
    claimant.received(D1, Refuse(sent.claim_id(D1), "hash_seed"), 0.1)
    assert claimant.outcome("request", 0.1) == Refused(("miss", "hash_seed"))


def test_leases_are_renewed_while_the_read_goes_on() -> None:
    claimant, sent = asking(D0)
    claim_id = sent.claim_id(D0)
    claimant.received(D0, grant(claim_id, 3, lease_ms=6000), 0.0)
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        claimant.renew(now_s)
    renewals = [message for _, message in sent if isinstance(message, Renew)]
    assert renewals == [Renew([claim_id], 6000)] * 2
    claimant.over("request")
    claimant.renew(100.0)
    assert len([message for _, message in sent if isinstance(message, Renew)]) == 2


def test_an_answer_from_somebody_else_is_not_taken() -> None:
    claimant, sent = asking(D0)
    claimant.received(D1, grant(sent.claim_id(D0), 3), 0.1)
    assert claimant.outcome("request", 0.1) is None


def test_the_same_grant_twice_is_one() -> None:
    claimant, sent = asking(D0)
    for _ in range(2):
        claimant.received(D0, grant(sent.claim_id(D0), 3), 0.1)
    assert isinstance(claimant.outcome("request", 0.1), Granted)
    assert sent.done() == []
