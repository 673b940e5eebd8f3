"""What turns work with: built once by the gateway, shared by all turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloop.engines.client import EngineClient
    from kvloop.engines.fleet import Fleet
    from kvloop.engines.pairs import Pairs
    from kvloop.engines.release import Releases
    from kvloop.ledger.deadline import DeadlineClock
    from kvloop.ledger.memory import Ledger
    from kvloop.ledger.pins import Pins
    from kvloop.observe.metrics import Metrics
    from kvloop.policy.route import Policy
    from kvloop.proof.fingerprint import Fingerprinter
    from kvloop.turn.canary import Canary
    from kvloop.turn.orphans import Orphans


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Longest waits, in seconds."""

    queue_s: float
    """For a place on an engine."""
    render_s: float
    """For token ids."""
    prefill_s: float
    """The whole P leg of a prompt that P computes."""
    pull_s: float
    """The whole P leg of a pull, before it is given up and done again cold."""
    first_byte_s: float
    """D's silence before its answer's first byte."""
    lease_s: float
    """How long P keeps its blocks while no D has asked for them (`kv_lease_duration`)."""
    silence_s: float
    """D's silence between two events."""
    decode_s: float
    """The whole D leg."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a turn needs besides its request."""

    fleet: Fleet
    client: EngineClient
    ledger: Ledger
    pins: Pins
    pin_budget: float
    """Share of a D's KV cache that it may pin for later turns."""
    pairs: Pairs
    policy: Policy
    fingerprinter: Fingerprinter
    deadlines: DeadlineClock
    releases: Releases
    orphans: Orphans
    canary: Canary
    metrics: Metrics
    timeouts: Timeouts
    clock: Callable[[], float]
    """Monotonic seconds."""
