"""Say in the engine's own ``/metrics`` what a router must know before it sends a pull.

Stock vLLM shows nowhere over HTTP whether an engine was started with ``bidirectional_kv_xfer``;
a pull sent to a prefill node without it waits for ever.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from prometheus_client import REGISTRY, Gauge

from kvloop.wire import CLAIM_CONNECTOR, CLAIM_PORT_OFFSET, ENGINE_INFO_METRIC

logger = logging.getLogger("vllm.kvloop")

# Defaults of vLLM 0.32: nixl/base_scheduler.py.
DEFAULT_DECODER_TTL_S = 480
DEFAULT_RECOMPUTE_THRESHOLD = 64


def publish_on_construction(module: Any) -> None:
    """Publish the gauge when vLLM constructs its chat API, which is when its config is known."""
    serving = module.OpenAIServingChat
    original = serving.__init__

    @wraps(original)
    def init_and_publish(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        publish(getattr(self.engine_client, "vllm_config", None))

    serving.__init__ = init_and_publish


def labels_of(vllm_config: Any) -> dict[str, str]:
    """The gauge's labels; empty values where the engine has no KV connector."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extra: dict[str, Any] = getattr(transfer, "kv_connector_extra_config", None) or {}
    return {
        "claim_host": _claim_host(transfer),
        "claim_ports": _claim_ports(vllm_config, transfer, extra),
        "kv_connector": str(getattr(transfer, "kv_connector", "") or ""),
        "kv_role": str(getattr(transfer, "kv_role", "") or ""),
        "engine_id": str(getattr(transfer, "engine_id", "") or ""),
        "kv_load_failure_policy": str(getattr(transfer, "kv_load_failure_policy", "") or ""),
        "bidirectional_kv_xfer": str(bool(extra.get("bidirectional_kv_xfer", False))).lower(),
        "decoder_kv_blocks_ttl_s": str(extra.get("decoder_kv_blocks_ttl", DEFAULT_DECODER_TTL_S)),
        "kv_recompute_threshold": str(
            extra.get("kv_recompute_threshold", DEFAULT_RECOMPUTE_THRESHOLD)
        ),
    }


def _claim_host(transfer: Any) -> str:
    if getattr(transfer, "kv_connector", None) != CLAIM_CONNECTOR:
        return ""
    from vllm import envs

    return str(envs.VLLM_NIXL_SIDE_CHANNEL_HOST)


def _claim_ports(vllm_config: Any, transfer: Any, extra: dict[str, Any]) -> str:
    """Where this engine answers claims, one port for each data-parallel rank, with commas."""
    if getattr(transfer, "kv_connector", None) != CLAIM_CONNECTOR:
        return ""
    from vllm import envs

    first = extra.get("kvloop_claim_port", envs.VLLM_NIXL_SIDE_CHANNEL_PORT + CLAIM_PORT_OFFSET)
    ranks = int(getattr(vllm_config.parallel_config, "data_parallel_size", 1) or 1)
    return ",".join(str(int(first) + rank) for rank in range(ranks))


def publish(vllm_config: Any) -> None:
    """Set the gauge to 1 with this engine's labels; once per process."""
    if ENGINE_INFO_METRIC in REGISTRY._names_to_collectors:
        return
    labels = labels_of(vllm_config)
    gauge = Gauge(
        ENGINE_INFO_METRIC,
        "What kvloop's plugin knows of this engine",
        list(labels),
        multiprocess_mode="livemax",
    )
    gauge.labels(**labels).set(1)
    logger.info("kvloop: engine info published: %s", labels)
