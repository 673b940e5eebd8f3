"""What turns work with: built once by the gateway, shared by all turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloop.engines.client import EngineClient
    from kvloop.engines.fleet import Fleet
    from kvloop.engines.release import Releases
    from kvloop.ledger.deadline import DeadlineClock
    from kvloop.ledger.memory import Ledger
    from kvloop.observe.metrics import Metrics
    from kvloop.policy.route import Policy
    from kvloop.proof.fingerprint import Fingerprinter


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Longest waits, in seconds."""

    prefill_s: float
    """The whole P leg of a prompt that P computes."""
    pull_s: float
    """The whole P leg of a pull, before it is given up and done again cold."""
    silence_s: float
    """D's silence: before its answer begins and between two events."""
    render_s: float


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a turn needs besides its request."""

    fleet: Fleet
    client: EngineClient
    ledger: Ledger
    policy: Policy
    fingerprinter: Fingerprinter
    deadlines: DeadlineClock
    releases: Releases
    metrics: Metrics
    timeouts: Timeouts
    clock: Callable[[], float]
    """Monotonic seconds."""
