"""What claims come to, in vLLM's own ``/metrics`` and its periodic log line.

vLLM carries a connector's stats from its engine core to its API server as a dict of lists, with
every step; an engine that does not step reports with its next one. To NIXL's lists these are added
(`vllm:nixl_*` stay as they are):

======================  ===========================================================================
claims_asked            requests for which holders were asked
claim_latency           seconds from the question to the grant that was used
claims_missed           reason of each holder that had nothing
claimed_tokens_read     tokens of each read that has ended
claims_received         claims that this engine was asked for, as a holder
claims_granted          of them granted
claimed_tokens_granted  tokens of the granted blocks
claims_refused          reason of each refusal
leases_expired          leases that no claimant has ended or renewed
======================  ===========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    from kvloop.vllm_plugin.claims.holder import HolderCounts

_COUNTERS: Final = {
    "claims_asked": ("kvloop:claims_asked", "Requests for whose prefix other engines were asked."),
    "claimed_tokens_read": (
        "kvloop:claimed_tokens_read",
        "Tokens whose KV was read from other engines by claim.",
    ),
    "claims_received": ("kvloop:claims_received", "Claims of other engines."),
    "claims_granted": ("kvloop:claims_granted", "Claims of other engines that were granted."),
    "claimed_tokens_granted": (
        "kvloop:claimed_tokens_granted",
        "Tokens whose KV blocks were granted to other engines.",
    ),
    "leases_expired": (
        "kvloop:claim_leases_expired",
        "Granted claims that their claimant neither ended nor renewed.",
    ),
}
_BY_REASON: Final = {
    "claims_missed": ("kvloop:claims_missed", "Asked engines that had nothing, by reason."),
    "claims_refused": ("kvloop:claims_refused", "Claims of other engines refused, by reason."),
}
_LATENCY: Final = "claim_latency"
_LATENCY_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_OURS: Final = (*_COUNTERS, *_BY_REASON, _LATENCY)


class ClaimStats(NixlKVConnectorStats):
    """NIXL's stats and those of claims; ``data`` maps names to lists."""

    def reset(self) -> None:
        """Empty every list."""
        super().reset()
        for name in _OURS:
            self.data[name] = []

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return super().is_empty() and not any(self.data.get(name) for name in _OURS)

    def aggregate(self, other: KVConnectorStats) -> ClaimStats:
        """Add the other side's lists: the worker's have no claims, the scheduler's no reads."""
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        said: dict[str, int | float] = super().reduce()
        for name in _COUNTERS:
            said[name.replace("_", " ").capitalize()] = sum(self.data.get(name, ()))
        return said

    def held(self, counts: HolderCounts, block_size: int) -> None:
        """Take over what the holder has counted since it was asked last."""
        for name, count in (
            ("claims_received", counts.claims),
            ("claims_granted", counts.grants),
            ("claimed_tokens_granted", counts.granted_blocks * block_size),
            ("leases_expired", counts.expired),
        ):
            if count:
                self.data[name].append(count)
        for reason, count in counts.refusals.items():
            self.data["claims_refused"] += [reason] * count


class ClaimPromMetrics(NixlPromMetrics):
    """NIXL's metrics and those of claims."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._claim_counters: dict[str, Any] = {}
        for key, (name, what) in _COUNTERS.items():
            counter = self._counter_cls(name=name, documentation=what, labelnames=labelnames)
            self._claim_counters[key] = create_metric_per_engine(counter, per_engine_labelvalues)
        self._reason_counters: dict[str, Any] = {
            key: self._counter_cls(
                name=name, documentation=what, labelnames=[*labelnames, "reason"]
            )
            for key, (name, what) in _BY_REASON.items()
        }
        latency = self._histogram_cls(
            name="kvloop:claim_latency_seconds",
            documentation="From the question to the grant that was used.",
            buckets=list(_LATENCY_BUCKETS_S),
            labelnames=labelnames,
        )
        self._claim_latency = create_metric_per_engine(latency, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one step has reported."""
        super().observe(transfer_stats_data, engine_idx)
        for key, counters in self._claim_counters.items():
            counters[engine_idx].inc(sum(transfer_stats_data.get(key, ())))
        labels = self.per_engine_labelvalues[engine_idx]
        for key, counter in self._reason_counters.items():
            for reason in transfer_stats_data.get(key, ()):
                counter.labels(*labels, reason).inc()
        for seconds in transfer_stats_data.get(_LATENCY, ()):
            self._claim_latency[engine_idx].observe(seconds)
