"""The sockets of the claim protocol, on a thread of their own.

The thread only carries messages: what comes in goes into a queue, and the engine's loop is woken;
what goes out was put into another by that loop. It decides nothing and touches no block.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import zmq

from kvloop.vllm_plugin.claims.messages import BadMessageError, Message, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloop.vllm_plugin.claims.claimant import Address

logger = logging.getLogger("kvloop.claims")

Peer: TypeAlias = bytes
"""A claimant's connection, as our ROUTER socket names it."""

_POLL_MS: Final = 1000
_MAX_QUEUED: Final = 10_000
"""Messages that may wait for the engine's loop; more are dropped, and their claims time out."""


class Endpoint:
    """Listens for claims and carries our own; messages in :attr:`claims` and :attr:`answers`."""

    def __init__(self, host: str, port: int, wire: Wire, wake: Callable[[], None]) -> None:
        """Bind. ``wake`` is called on the sockets' thread when there is something to do.

        Raises zmq.ZMQError if the port cannot be had.
        """
        self.claims: deque[tuple[Peer, Message]] = deque()
        self.answers: deque[tuple[Address, Message]] = deque()
        self.dropped = 0
        self.next_end_s: float | None = None
        """When the loop wants to be woken (monotonic seconds), if nothing comes before."""
        self._wire = wire
        self._wake = wake
        self._out: deque[tuple[Peer | Address, Message]] = deque()
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"tcp://{_bracketed(host)}:{port}")
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._dealers: dict[Address, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvloop-claims")
        self._thread.start()

    def reply(self, peer: Peer, message: Message) -> None:
        """Send to a claimant; from any thread."""
        self._put(peer, message)

    def send(self, address: Address, message: Message) -> None:
        """Send to a holder; from any thread."""
        self._put(address, message)

    def close(self) -> None:
        """End the thread and its sockets."""
        self._stop = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(timeout=5.0)

    def _put(self, to: Peer | Address, message: Message) -> None:
        self._out.append((to, message))
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            for socket in (self._router, *self._dealers.values()):
                socket.close(linger=0)
            self._context.term()
            os.close(self._wakeup)

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._timeout_ms()))
        has_news = False
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        if self._router in ready:
            has_news |= self._receive_claims()
        for address, dealer in self._dealers.items():
            if dealer in ready:
                has_news |= self._receive_answers(address, dealer)
        while self._out:
            self._transmit(*self._out.popleft())
        if self.next_end_s is not None and time.monotonic() >= self.next_end_s:
            self.next_end_s = None
            has_news = True
        if has_news:
            self._wake()

    def _timeout_ms(self) -> int:
        if self.next_end_s is None:
            return _POLL_MS
        return max(0, min(_POLL_MS, int((self.next_end_s - time.monotonic()) * 1000) + 1))

    def _receive_claims(self) -> bool:
        received = False
        while (frames := _frames(self._router)) is not None:
            peer, *rest = frames
            message = self._decode(rest)
            if message is not None:
                self.claims.append((peer, message))
                received = True
        return received

    def _receive_answers(self, address: Address, dealer: zmq.Socket[bytes]) -> bool:
        received = False
        while (frames := _frames(dealer)) is not None:
            message = self._decode(frames)
            if message is not None:
                self.answers.append((address, message))
                received = True
        return received

    def _decode(self, frames: list[bytes]) -> Message | None:
        if len(self.claims) + len(self.answers) >= _MAX_QUEUED:
            self.dropped += 1
            return None
        try:
            return self._wire.decode(frames)
        except BadMessageError as error:
            self.dropped += 1
            logger.warning("a message was dropped: %s", error)
            return None

    def _transmit(self, to: Peer | Address, message: Message) -> None:
        frames = self._wire.encode(message)
        socket = self._router
        if isinstance(to, bytes):
            frames = [to, *frames]
        else:
            socket = self._dealers.get(to) or self._connect(to)
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The peer is gone or takes nothing: claims time out and leases end by themselves.
            self.dropped += 1
            logger.info("a message to %s was not sent: %s", to, error)

    def _connect(self, address: Address) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 0)
        host, port = address
        dealer.connect(f"tcp://{_bracketed(host)}:{port}")
        self._dealers[address] = dealer
        self._poller.register(dealer, zmq.POLLIN)
        return dealer


def _frames(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
