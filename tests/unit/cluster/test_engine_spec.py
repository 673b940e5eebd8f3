from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvloop.cluster.engine_spec import EngineSpec, engine_command, engine_environment
from kvloop.engines.fleet import Role


def spec(role: Role = Role.PREFILL, **fields: Any) -> EngineSpec:
    return EngineSpec(
        **{
            "name": "prefill-0",
            "role": role,
            "model": Path("/models/small"),
            "port": 8100,
            "side_channel_port": 5700,
            **fields,
        }
    )


def option(command: list[str], name: str) -> str:
    assert command.count(name) == 1, f"{name} given {command.count(name)} times"
    return command[command.index(name) + 1]


def test_the_engine_runs_in_this_interpreter_on_loopback() -> None:
    command = engine_command(spec())
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--port") == "8100"
    assert option(command, "--model") == "/models/small"
    assert option(command, "--served-model-name") == "smollm2"
    assert option(command, "--dtype") == "bfloat16"
    assert spec().url == "http://127.0.0.1:8100"


@pytest.mark.parametrize(
    "engine",
    [spec(), spec(prefix_caching=False), spec(Role.DECODE)],
    ids=["prefill", "prefill without prefix cache", "decode"],
)
def test_every_engine_transfers_in_both_directions_and_fails_rather_than_hangs(
    engine: EngineSpec,
) -> None:
    config = json.loads(option(engine_command(engine), "--kv-transfer-config"))
    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True


def test_times_and_threshold_reach_the_connector_under_vllms_names() -> None:
    command = engine_command(
        spec(decoder_kv_blocks_ttl_s=90, kv_lease_duration_s=12, kv_recompute_threshold=7)
    )
    extra = json.loads(option(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra == {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": 90,
        "kv_lease_duration": 12,
        "kv_recompute_threshold": 7,
        "num_threads": 1,
    }


def test_prefix_caching_is_said_either_way() -> None:
    on, off = "--enable-prefix-caching", "--no-enable-prefix-caching"
    assert on in engine_command(spec())
    assert off not in engine_command(spec())
    assert off in engine_command(spec(prefix_caching=False))
    assert on not in engine_command(spec(prefix_caching=False))


def test_render_endpoints_and_cached_token_counts_are_switched_on() -> None:
    command = engine_command(spec())
    assert {"--enable-scale-out", "--enable-prompt-tokens-details", "--enforce-eager"} <= set(
        command
    )


def test_extra_arguments_come_last_so_that_they_win() -> None:
    assert engine_command(spec(extra_args=("--max-num-seqs", "2")))[-2:] == ["--max-num-seqs", "2"]


def test_the_environment_adds_to_the_inherited_one_and_extra_settings_win() -> None:
    environment = engine_environment(
        spec(extra_env={"UCX_TLS": "tcp"}), {"PATH": "/bin", "UCX_TLS": "rc"}
    )
    assert environment["PATH"] == "/bin"
    assert environment["UCX_TLS"] == "tcp"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_kv_caches_size_is_the_specs_whatever_the_shell_says() -> None:
    engine = spec(kv_cache_gib=0.25)
    assert option(engine_command(engine), "--kv-cache-memory-bytes") == str(256 * 2**20)
    inherited = {"VLLM_CPU_KVCACHE_SPACE": "40", "OMP_NUM_THREADS": "64"}
    assert not inherited.keys() & engine_environment(engine, inherited).keys()


def test_nothing_listens_beyond_loopback() -> None:
    environment = engine_environment(spec(), {})
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["UCX_NET_DEVICES"] == "lo"


def test_all_engines_hash_alike() -> None:
    hashes = {
        engine_environment(spec(role), {"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"]
        for role in (Role.PREFILL, Role.DECODE)
    }
    assert hashes == {"0"}


def test_bound_engines_have_a_thread_per_core_and_leave_binding_to_their_starter() -> None:
    bound = engine_environment(spec(cores=(2, 3)), {})
    assert bound["OMP_NUM_THREADS"] == "2"
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    free = engine_environment(spec(), {})
    assert "OMP_NUM_THREADS" not in free
    assert free["VLLM_CPU_OMP_THREADS_BIND"] == "auto"


@pytest.mark.parametrize("block_size", [0, 16, 48])
def test_a_block_size_that_vllm_refuses_is_refused_before_the_start(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 32, not {block_size}"):
        spec(block_size=block_size)


def test_a_decode_node_without_prefix_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="needs its prefix cache"):
        spec(Role.DECODE, prefix_caching=False)


def test_a_lease_too_short_for_a_heartbeat_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        spec(kv_lease_duration_s=5)
