"""The holder: grants what has been written, refuses with the reason."""

from kvloop.vllm_plugin.claims.holder import Holder, Whereabouts
from kvloop.vllm_plugin.claims.leases import Leases
from kvloop.vllm_plugin.claims.messages import Done, Grant, Message, Refuse, Renew, Terms
from tests.unit.vllm_plugin.claims.builders import TERMS, FakeBlock, FakePool, claim, pool_of

WHERE = Whereabouts("engine-d", "10.0.0.1", 5601, 1, 1, 1)
PEER = b"peer"


class Said(list[Message]):
    """Replies so far."""

    def __call__(self, peer: bytes, message: Message) -> None:
        assert peer == PEER
        self.append(message)


def holder_of(pool: FakePool, **more: str) -> tuple[Holder[FakeBlock], Said]:
    said = Said()
    holder = Holder(TERMS, WHERE, Leases(pool, 100), lambda block: block.block_id, said, **more)
    return holder, said


def test_a_grant_says_which_blocks_and_where() -> None:
    holder, said = holder_of(pool_of(1, 2, 3))
    holder.received(PEER, claim(numbers=(1, 2, 9)), [], 0.0)
    assert said == [Grant(b"claim-1", "engine-d", "10.0.0.1", 5601, 1, 1, 1, [[0, 1]], 5000)]
    assert (holder.counts.claims, holder.counts.grants, holder.counts.granted_blocks) == (1, 1, 2)


def test_a_grant_waits_for_the_steps_that_were_in_flight_and_for_no_later_ones() -> None:
    pool = pool_of(1, 2, 3)
    holder, said = holder_of(pool)
    holder.received(PEER, claim(), ["step-1", "step-2"], 0.0)
    assert pool.evictable() == set()  # held at once
    assert holder.waits_for_steps
    holder.confirm(["step-2", "step-3"])
    assert said == []
    holder.confirm(["step-3", "step-4"])
    assert [type(message) for message in said] == [Grant]
    assert not holder.waits_for_steps


def test_a_claim_that_is_given_up_before_its_grant_gets_none() -> None:
    pool = pool_of(1, 2, 3)
    holder, said = holder_of(pool)
    holder.received(PEER, claim(), ["step"], 0.0)
    holder.received(PEER, Done(b"claim-1"), ["step"], 0.0)
    holder.confirm([])
    assert said == []
    assert len(pool.evictable()) == 3


def test_a_lease_that_ended_before_its_steps_did_is_not_granted() -> None:
    pool = pool_of(1, 2, 3)
    holder, said = holder_of(pool)
    holder.received(PEER, claim(lease_ms=1000), ["step"], 0.0)
    holder.expire(1.0)
    holder.confirm([])
    assert said == []
    assert holder.counts.expired == 1


def test_renewals_keep_and_done_lets_go() -> None:
    pool = pool_of(1, 2, 3)
    holder, _ = holder_of(pool)
    holder.received(PEER, claim(), [], 0.0)
    holder.received(PEER, Renew([b"claim-1", b"unknown"], 5000), [], 4.0)
    holder.expire(8.0)
    assert pool.evictable() == set()
    assert holder.next_end_s == 9.0 or holder.next_end_s == 5.0
    holder.received(PEER, Done(b"claim-1"), [], 8.0)
    assert len(pool.evictable()) == 3


def test_what_does_not_agree_is_refused_with_the_reason() -> None:
    pool = pool_of(1, 2, 3)
    holder, said = holder_of(pool)
    holder.received(PEER, claim(version=99), [], 0.0)
    holder.received(PEER, claim(terms=Terms("sha256", b"x", 32, 1, "compatible")), [], 0.0)
    holder.received(PEER, claim(numbers=(7,)), [], 0.0)
    assert said == [Refuse(b"claim-1", reason) for reason in ("version", "hash_seed", "miss")]
    assert holder.counts.refusals == {"version": 1, "hash_seed": 1, "miss": 1}
    assert len(pool.evictable()) == 3


def test_an_engine_without_a_prefix_cache_says_so() -> None:
    holder, said = holder_of(pool_of(1, 2, 3), refuses_all="no_prefix_cache")
    holder.received(PEER, claim(), [], 0.0)
    assert said == [Refuse(b"claim-1", "no_prefix_cache")]
