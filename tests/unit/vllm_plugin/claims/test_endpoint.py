"""Two endpoints over real sockets: messages arrive, strangers are ignored, deadlines wake."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvloop.vllm_plugin.claims.endpoint import Endpoint
from kvloop.vllm_plugin.claims.messages import Done, Refuse, Wire


class Waiting:
    """Counts wake-ups."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)

    def __call__(self) -> None:
        self.woken.release()

    def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.woken.acquire(timeout=max(0.0, deadline_s - time.monotonic()))


@pytest.fixture
def pair() -> Iterator[tuple[Endpoint, Waiting, Endpoint, Waiting]]:
    wakes = Waiting(), Waiting()
    holder = Endpoint("127.0.0.1", 0, Wire("secret"), wakes[0])
    claimant = Endpoint("127.0.0.1", 0, Wire("secret"), wakes[1])
    yield holder, wakes[0], claimant, wakes[1]
    holder.close()
    claimant.close()


def test_a_claim_and_its_answer(pair: tuple[Endpoint, Waiting, Endpoint, Waiting]) -> None:
    holder, holder_wakes, claimant, claimant_wakes = pair
    address = ("127.0.0.1", holder.port)
    claimant.send(address, Done(b"1"))
    holder_wakes.until(lambda: holder.claims)
    peer, message = holder.claims.popleft()
    assert message == Done(b"1")
    holder.reply(peer, Refuse(b"1", "miss"))
    claimant_wakes.until(lambda: claimant.answers)
    assert claimant.answers.popleft() == (address, Refuse(b"1", "miss"))


def test_strangers_and_peers_that_are_gone_harm_nobody(
    pair: tuple[Endpoint, Waiting, Endpoint, Waiting],
) -> None:
    holder, holder_wakes, claimant, _ = pair
    stranger = Endpoint("127.0.0.1", 0, Wire("another secret"), lambda: None)
    stranger.send(("127.0.0.1", holder.port), Done(b"x"))
    holder.reply(b"nobody", Done(b"y"))
    claimant.send(("127.0.0.1", 9), Done(b"z"))  # nobody listens there
    deadline_s = time.monotonic() + 10
    while holder.dropped == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    claimant.send(("127.0.0.1", holder.port), Done(b"1"))
    holder_wakes.until(lambda: holder.claims)
    assert [message for _, message in holder.claims] == [Done(b"1")]
    stranger.close()


def test_it_wakes_when_it_was_asked_to(pair: tuple[Endpoint, Waiting, Endpoint, Waiting]) -> None:
    holder, wakes, claimant, _ = pair
    holder.next_end_s = time.monotonic() + 0.05
    claimant.send(("127.0.0.1", holder.port), Done(b"1"))  # so that it looks at its clock
    wakes.until(lambda: holder.next_end_s is None)
