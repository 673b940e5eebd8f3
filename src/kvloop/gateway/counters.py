"""What the HTTP surface counts, in the router's own registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class Counters:
    """Metrics of the HTTP surface, by attribute."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refused = Counter(
            "kvloop_refused_requests",
            "Requests and connections that were refused before they became turns",
            ["why"],
            registry=registry,
        )
        self.unhandled = Counter(
            "kvloop_unhandled_errors",
            "Errors in the router itself; the log has where. Each is a defect",
            registry=registry,
        )
        self.connections = Gauge(
            "kvloop_connections", "Open connections of clients", registry=registry
        )
