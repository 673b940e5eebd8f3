"""Leases: what is held cannot be evicted, what is over can, and the counts add up."""

import random

from kvloop.vllm_plugin.claims.leases import LONGEST_LEASE_S, Lease, Leases
from tests.unit.vllm_plugin.claims.builders import FakeBlock, FakePool, hashes, pool_of

P0, P1 = b"claimant-0", b"claimant-1"


def leases_of(pool: FakePool, max_blocks: int = 100) -> Leases[FakeBlock]:
    return Leases(pool, max_blocks)


def test_the_leading_blocks_that_are_there_are_held_until_the_claimant_is_done() -> None:
    pool = pool_of(1, 2, 3, 5)
    leases = leases_of(pool)
    lease = leases.claim(b"c", P0, hashes(1, 2, 4, 5), 5.0, 0.0)
    assert isinstance(lease, Lease)
    assert [column[0].block_id for column in lease.columns] == [0, 1]
    assert pool.evictable() == {2, 3}
    assert leases.done(b"c", P0)
    assert pool.evictable() == {0, 1, 2, 3}
    assert not leases.done(b"c", P0)


def test_many_may_hold_the_same_blocks() -> None:
    pool = pool_of(1, 2)
    leases = leases_of(pool)
    for number in range(10):
        assert isinstance(leases.claim(b"%d" % number, P0, hashes(1, 2), 5.0, 0.0), Lease)
    for number in range(9):
        leases.done(b"%d" % number, P0)
    assert pool.evictable() == set()
    leases.done(b"9", P0)
    assert pool.evictable() == {0, 1}


def test_nothing_there_and_no_room_are_refused() -> None:
    leases = leases_of(pool_of(1, 2, 3), max_blocks=2)
    assert leases.claim(b"a", P0, hashes(9), 5.0, 0.0) == "miss"
    assert leases.claim(b"b", P0, [], 5.0, 0.0) == "miss"
    lease = leases.claim(b"c", P0, hashes(1, 2, 3), 5.0, 0.0)
    assert isinstance(lease, Lease)
    assert len(lease.columns) == 2
    assert leases.claim(b"d", P0, hashes(3), 5.0, 0.0) == "busy"


def test_a_lease_ends_unless_it_is_renewed() -> None:
    pool = pool_of(1)
    leases = leases_of(pool)
    leases.claim(b"c", P0, hashes(1), 5.0, 0.0)
    assert leases.renew(b"c", P0, 5.0, 4.0)
    assert leases.expire(8.9) == 0
    assert leases.next_end_s() == 9.0
    assert leases.expire(9.0) == 1
    assert pool.evictable() == {0}
    assert leases.next_end_s() is None
    assert not leases.renew(b"c", P0, 5.0, 9.0)


def test_no_wish_is_longer_than_the_longest_lease() -> None:
    leases = leases_of(pool_of(1))
    leases.claim(b"c", P0, hashes(1), 1e9, 0.0)
    assert leases.expire(LONGEST_LEASE_S) == 1


def test_only_its_claimant_may_touch_a_lease() -> None:
    leases = leases_of(pool_of(1, 2))
    leases.claim(b"c", P0, hashes(1), 5.0, 0.0)
    assert not leases.done(b"c", P1)
    assert not leases.renew(b"c", P1, 60.0, 0.0)
    assert leases.claim(b"c", P1, hashes(2), 5.0, 0.0) == "claim_id"


def test_a_claim_that_comes_twice_is_one_lease() -> None:
    pool = pool_of(1)
    leases = leases_of(pool)
    first = leases.claim(b"c", P0, hashes(1), 5.0, 0.0)
    assert leases.claim(b"c", P0, hashes(1), 5.0, 1.0) is first
    leases.done(b"c", P0)
    assert pool.evictable() == {0}


def test_whatever_happens_a_block_is_held_by_exactly_the_leases_that_are_on_it() -> None:
    chance = random.Random(3)
    pool, now_s = pool_of(*range(30)), 0.0
    leases = leases_of(pool, max_blocks=60)
    for step in range(5000):
        now_s += chance.random()
        claim_id, peer = b"%d" % chance.randrange(40), chance.choice([P0, P1])
        match chance.randrange(4):
            case 0:
                start = chance.randrange(30)
                wanted = hashes(*range(start, start + chance.randrange(8)))
                leases.claim(claim_id, peer, wanted, chance.uniform(0, 9), now_s)
            case 1:
                leases.done(claim_id, peer)
            case 2:
                leases.renew(claim_id, peer, chance.uniform(0, 9), now_s)
            case 3:
                leases.expire(now_s)
        held: dict[int, int] = {}
        for lease in leases._leases.values():
            for (block,) in lease.columns:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        counts = {block.block_id: block.ref_cnt for block in pool.cached.values()}
        assert {key: count for key, count in counts.items() if count} == held, step
        assert leases.leased_blocks == sum(held.values()) <= 60
    leases.expire(now_s + LONGEST_LEASE_S)
    assert len(pool.evictable()) == 30
