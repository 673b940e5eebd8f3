"""Facts: read from what vLLM's endpoints say, refused when they say something else."""

import pytest

from kvloop.engines.facts import EngineLoad, read_facts, read_load, started_s

METRICS = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="2912"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
process_start_time_seconds 1.7e+09
"""
PLUGIN = b"""kvloop:engine_info{kv_connector="NixlConnector",bidirectional_kv_xfer="%s"} 1.0
"""
MODELS = b'{"object":"list","data":[{"id":"m","max_model_len":4096},{"id":"adapter"}]}'
VERSION = b'{"version":"0.32.0"}'


def test_facts_are_read() -> None:
    facts = read_facts(METRICS, MODELS, VERSION, renders=True)
    assert (facts.block_size, facts.kv_capacity_tokens, facts.prefix_caching) == (16, 46592, False)
    assert facts.model_names == {"m", "adapter"}
    assert facts.started_s == started_s(METRICS) == 1.7e9
    assert facts.longest_tokens == 4096
    silent = read_facts(METRICS, b'{"object":"list","data":[{"id":"m"}]}', VERSION, renders=True)
    assert silent.longest_tokens == 46592


def test_k23_without_the_plugin_streams_carry_no_references_before_033() -> None:
    assert not read_facts(METRICS, MODELS, VERSION, renders=True).streams_references
    assert read_facts(METRICS, MODELS, b'{"version":"0.33.0"}', renders=True).streams_references
    assert read_facts(METRICS, MODELS, b'{"version":"1.0.1"}', renders=True).streams_references
    assert not read_facts(METRICS, MODELS, b"not json", renders=True).streams_references
    with_plugin = METRICS + PLUGIN % b"true"
    assert read_facts(with_plugin, MODELS, VERSION, renders=True).streams_references


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.32.0", True), ("0.31.9", False), ("1.0.0", True), ("0.32.0.dev3+cpu", True), ("", True)],
)
def test_k13_versions_that_strand_expired_pins_are_known(version: str, supported: bool) -> None:
    said = b'{"version":"%s"}' % version.encode()
    assert read_facts(METRICS, MODELS, said, renders=True).is_supported is supported


@pytest.mark.parametrize(("said", "can_pull"), [(b"true", True), (b"false", False)])
def test_k26_the_plugin_says_whether_an_engine_can_pull(said: bytes, can_pull: bool) -> None:
    facts = read_facts(METRICS + PLUGIN % said, MODELS, VERSION, renders=True)
    assert facts.can_pull is can_pull


@pytest.mark.parametrize(
    ("metrics", "models"),
    [(b"", MODELS), (b"<html>", MODELS), (METRICS, b"[]"), (METRICS, b'{"data": 3}')],
)
def test_what_is_no_vllm_engine_is_refused(metrics: bytes, models: bytes) -> None:
    with pytest.raises(ValueError, match=r"cache_config_info|models"):
        read_facts(metrics, models, VERSION, renders=True)


def test_load_counts_who_waits_for_room_over_all_ranks() -> None:
    body = b"""
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 9.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 8.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 1.0
"""
    assert read_load(body) == EngineLoad(kv_usage=0.75, running=7, waiting=2)
    assert read_load(b"") == EngineLoad(kv_usage=0.0, running=0, waiting=0)


def test_k14_k29_older_versions_are_known_too() -> None:
    for version, is_supported in {"0.31.3": False, "0.32.0": True, "1.0.0": True}.items():
        body = f'{{"version": "{version}"}}'.encode()
        facts = read_facts(METRICS, MODELS, body, renders=True)
        assert facts.is_supported is is_supported
