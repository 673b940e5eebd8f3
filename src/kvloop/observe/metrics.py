"""The router's own Prometheus metrics.

One registry per router, so that several can live in one process (tests, the simulator).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Every metric of the router, by attribute."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter(
            "kvloop_turns",
            "Turns by route as it turned out, and why",
            ["api", "route", "why"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "kvloop_prompt_tokens",
            "Prompt tokens of served turns by where their KV came from: pulled, cached or computed",
            ["source"],
            registry=self.registry,
        )
        self.cold_retries = Counter(
            "kvloop_cold_retries",
            "Pulls that a prefill node refused and that were done again without",
            ["why"],
            registry=self.registry,
        )
        self.claims = Counter(
            "kvloop_claims",
            "Claims that prefill nodes made on decode nodes, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.references = Counter(
            "kvloop_references",
            "KV references by what became of them",
            ["outcome"],
            registry=self.registry,
        )
        self.releases = Counter(
            "kvloop_releases",
            "Early releases of blocks that are of no more use",
            ["outcome"],
            registry=self.registry,
        )
        self.engine_errors = Counter(
            "kvloop_engine_errors",
            "Legs that failed, by leg and kind",
            ["leg", "kind"],
            registry=self.registry,
        )
        self.leg_seconds = Histogram(
            "kvloop_leg_seconds",
            "Duration of render, of the prefill leg, and of the decode leg up to its head",
            ["leg"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvloop_turns_in_flight", "Turns being served", registry=self.registry
        )
        self.ledger_entries = Gauge(
            "kvloop_ledger_entries", "Conversations in the ledger", registry=self.registry
        )
        self.ledger_bytes = Gauge(
            "kvloop_ledger_bytes", "Memory that the ledger takes, roughly", registry=self.registry
        )
        self.pinned_tokens = Gauge(
            "kvloop_pinned_tokens",
            "Tokens that a decode node pins for us: held for a next turn, claimed by one, leaving, "
            "or stuck until their time is over",
            ["decode", "state"],
            registry=self.registry,
        )
        self.shed = Counter(
            "kvloop_shed_turns",
            "Turns turned away because an engine's queue was full or the wait too long",
            ["role", "why"],
            registry=self.registry,
        )
        self.canary_checks = Counter(
            "kvloop_canary_checks",
            "Pulled turns that were also computed cold, by how the two compared",
            ["outcome"],
            registry=self.registry,
        )
        self.reuse_off = Gauge(
            "kvloop_reuse_off",
            "1 while reuse is off between two engines because their answers diverged: an alarm",
            ["prefill", "decode"],
            registry=self.registry,
        )
        self.orphans = Counter(
            "kvloop_orphaned_prefills",
            "Prefill legs whose client had left, by how they ended",
            ["outcome"],
            registry=self.registry,
        )
        self.engine_requests = Gauge(
            "kvloop_engine_requests",
            "Legs that an engine is working on, and turns that wait for a place there",
            ["role", "url", "state"],
            registry=self.registry,
        )
        self.breaker_open = Gauge(
            "kvloop_breaker_open",
            "1 while an engine is left alone after failures, 0.5 while it is tried again",
            ["role", "url"],
            registry=self.registry,
        )
        self.engine_usable = Gauge(
            "kvloop_engine_usable",
            "1 if turns may be sent there",
            ["role", "url"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)
