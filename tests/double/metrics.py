"""The double's ``/metrics``, under vLLM's names."""

from __future__ import annotations

from tests.double.engine import Engine


def metrics_text(engine: Engine) -> str:
    """Prometheus text."""
    engine.expire()
    memory, counters = engine.memory, engine.counters
    samples: dict[str, float] = {
        "num_requests_running": len(engine.running),
        "num_requests_waiting": engine.num_waiting,
        "kv_cache_usage_perc": memory.num_used / memory.num_blocks,
        "prefix_cache_queries_total": memory.queried_tokens,
        "prefix_cache_hits_total": memory.hit_tokens,
        "external_prefix_cache_queries_total": counters.external_queries,
        "external_prefix_cache_hits_total": counters.external_hits,
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.generation_tokens,
        "num_preemptions_total": 0,
        "nixl_num_kv_expired_reqs_total": counters.expired_requests,
        "nixl_num_notifications_after_expiry_total": engine.late_notices,
        "nixl_num_failed_transfers_total": counters.failed_transfers,
        "nixl_bytes_transferred_sum": counters.bytes_read,
        "nixl_bytes_transferred_count": counters.transfers,
    }
    labels = _labels(engine="0", model_name=engine.model)
    info = _labels(
        block_size=str(engine.block_size),
        enable_prefix_caching=str(engine.prefix_caching),
        engine="0",
        num_gpu_blocks=str(engine.num_blocks),
    )
    lines = [f"vllm:{name}{labels} {float(value)}" for name, value in samples.items()]
    for reason, value in {"capacity": engine.num_waiting, "deferred": 0}.items():
        by_reason = _labels(engine="0", model_name=engine.model, reason=reason)
        lines.append(f"vllm:num_requests_waiting_by_reason{by_reason} {float(value)}")
    lines.append(f"vllm:cache_config_info{info} 1.0")
    lines.append(f"process_start_time_seconds {engine.started_s}")
    if engine.plugin:
        own = _labels(
            plugin_version="0.1.0",
            kv_connector="KVLoopConnector" if engine.claims else "NixlConnector",
            claim_host=engine.side_host if engine.claims else "",
            claim_ports=str(engine.side_port + 1000) if engine.claims else "",
            kv_role="kv_both",
            bidirectional_kv_xfer=str(engine.bidirectional).lower(),
            kv_load_failure_policy=engine.kv_load_failure_policy,
            decoder_kv_blocks_ttl_s=f"{engine.ttl_s:g}",
            kv_recompute_threshold=str(engine.kv_recompute_threshold),
            engine_id=engine.engine_id,
        )
        lines.append(f"kvloop:engine_info{own} 1.0")
    return "\n".join(lines) + "\n"


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
