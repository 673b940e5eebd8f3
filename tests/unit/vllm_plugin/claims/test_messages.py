"""Messages survive the wire whole, and nothing else is taken for one."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.vllm_plugin.claims.messages import (
    BadMessageError,
    Claim,
    Done,
    Grant,
    Message,
    Refuse,
    Renew,
    Terms,
    Wire,
    disagreement,
    seed_fingerprint,
)
from tests.unit.vllm_plugin.claims.builders import TERMS

_ids = st.binary(min_size=1, max_size=16)
_blocks = st.lists(st.lists(st.integers(0, 2**31), max_size=5), max_size=3)
_port = st.integers(1, 65535)
_messages = st.one_of(
    st.builds(
        Claim,
        version=st.integers(0, 9),
        claim_id=_ids,
        claimant=st.text(max_size=8),
        terms=st.builds(Terms, st.text(max_size=8), _ids, st.integers(1, 256), _port, st.text()),
        first=st.integers(0, 10_000),
        hashes=st.lists(st.binary(min_size=32, max_size=32), max_size=4),
        lease_ms=st.integers(0, 60_000),
    ),
    st.builds(Grant, _ids, st.text(), st.text(), _port, _port, _port, _port, _blocks, _port),
    st.builds(Refuse, _ids, st.text()),
    st.builds(Done, _ids),
    st.builds(Renew, st.lists(_ids, max_size=4), st.integers(0, 60_000)),
)


@given(_messages, st.text(max_size=20))
def test_what_is_sent_is_what_arrives(message: Message, secret: str) -> None:
    wire = Wire(secret)
    assert wire.decode(wire.encode(message)) == message


@given(_messages)
def test_another_secret_is_not_believed(message: Message) -> None:
    for ours, theirs in (("one", "two"), ("one", ""), ("", "one")):
        with pytest.raises(BadMessageError, match="seal"):
            Wire(ours).decode(Wire(theirs).encode(message))


@given(_messages, st.data())
def test_a_message_that_was_changed_on_its_way_is_not_believed(
    message: Message, data: st.DataObject
) -> None:
    wire = Wire("a secret")
    body, seal = wire.encode(message)
    position = data.draw(st.integers(0, len(body) - 1))
    changed = bytearray(body)
    changed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadMessageError):
        wire.decode([bytes(changed), seal])


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_rubbish_is_refused_and_never_more_than_that(frames: list[bytes]) -> None:
    with contextlib.suppress(BadMessageError):
        Wire("").decode(frames)


def test_engines_that_could_never_agree_say_on_what() -> None:
    other = {
        "hash_algorithm": Terms("xxhash", b"seed", 32, 1, "compatible"),
        "hash_seed": Terms("sha256", b"another", 32, 1, "compatible"),
        "block_size": Terms("sha256", b"seed", 16, 1, "compatible"),
        "groups": Terms("sha256", b"seed", 32, 2, "compatible"),
        "layout": Terms("sha256", b"seed", 32, 1, "other"),
    }
    assert disagreement(TERMS, TERMS) is None
    for reason, terms in other.items():
        assert disagreement(TERMS, terms) == reason


def test_the_fingerprint_of_a_seed_tells_seeds_apart_and_not_what_they_are() -> None:
    assert seed_fingerprint(b"x" * 32) != seed_fingerprint(b"y" * 32)
    assert b"x" * 8 not in seed_fingerprint(b"x" * 32)
