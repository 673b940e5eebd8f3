"""The worker side: reads as vLLM's does; the ends of claimed reads are told to the scheduler side.

NIXL tells the engine that was read from under the name of the read request. A claim has no such
request: it ends by the claim protocol, and NIXL's notice of it is dropped here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvloop.vllm_plugin.connector_stats import ClaimStats
from kvloop.wire import CLAIM_REQUEST_PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_PREFIX = CLAIM_REQUEST_PREFIX.encode()


class ClaimingWorker(NixlPullConnectorWorker):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = ClaimStats()  # the scheduler side's are added to it
        self.nixl_wrapper: Any = _WithoutClaimNotices(self.nixl_wrapper)


class _WithoutClaimNotices:
    """NIXL's agent, silent about claims."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """What readers have told, less the ends of claimed reads."""
        return {
            agent: [notice for notice in notices if not notice.startswith(_PREFIX)]
            for agent, notices in self._agent.get_new_notifs().items()
        }
