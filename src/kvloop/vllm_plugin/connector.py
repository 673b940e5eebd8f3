"""`KVLoopConnector`: vLLM's NIXL pull connector, with claims in place of pins (docs/claims.md).

--kv-transfer-config '{"kv_connector": "KVLoopConnector",
                       "kv_connector_module_path": "kvloop.vllm_plugin.connector", ...}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvloop.vllm_plugin.required_vllm  # noqa: F401 - raises before what follows can fail

# isort: split

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvloop.vllm_plugin.claiming_scheduler import ClaimingScheduler
from kvloop.vllm_plugin.claiming_worker import ClaimingWorker
from kvloop.vllm_plugin.connector_stats import ClaimPromMetrics, ClaimStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVLoopConnector(NixlPullConnector):
    """P to D as in vLLM; D to P by claims."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler_side: ClaimingScheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_side = ClaimingScheduler(vllm_config, self.engine_id, kv_cache_config)
            self.connector_scheduler = self._scheduler_side
        else:
            self.connector_worker = ClaimingWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM shows its block pool once it exists; claims are granted from it."""
        if self._scheduler_side is not None:
            self._scheduler_side.grant_from(gpu_block_pool)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The worker's reads, or the scheduler side's claims."""
        if self._scheduler_side is not None:
            return self._scheduler_side.take_stats()
        stats: KVConnectorStats | None = super().get_kv_connector_stats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ClaimStats:
        """Stats out of what came from the engine core."""
        return ClaimStats(data=data) if data is not None else ClaimStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ClaimPromMetrics:
        """What appears in vLLM's ``/metrics``."""
        return ClaimPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
