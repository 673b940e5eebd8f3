"""One engine to start: what is said of it, and the command and environment that follow.

Pure: nothing here starts a process, opens a port or reads the environment. The settings are those
of vLLM 0.32 on CPUs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvloop.engines.fleet import Role

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVED_MODEL_NAME: Final = "smollm2"
LOOPBACK: Final = "127.0.0.1"
_GIB: Final = 2**30
_NOT_INHERITED: Final = frozenset({"VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"})
"""vLLM lets the first overrule ``--kv-cache-memory-bytes``; the second is said by ``cores``."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A vLLM engine on loopback. Times in seconds, sizes in GiB, lengths in tokens."""

    name: str
    role: Role
    model: Path
    port: int
    side_channel_port: int
    cores: tuple[int, ...] = ()
    """The only CPU cores that the engine's processes may use, one thread each; empty: any."""
    prefix_caching: bool = True
    served_model_name: str = SERVED_MODEL_NAME
    max_model_len: int = 4096
    block_size: int = 32
    """vLLM 0.32's CPU attention supports multiples of 32 only."""
    max_num_seqs: int = 16
    kv_cache_gib: float = 0.5
    """23,000 tokens of the small model. vLLM touches all of it at the start, which costs seconds
    per GiB on virtual machines."""
    decoder_kv_blocks_ttl_s: int = 480
    kv_lease_duration_s: int = 30
    kv_recompute_threshold: int = 64
    """P computes a history shorter than this many tokens itself."""
    claims: bool = False
    """Run kvloop's own connector: nothing is pinned between turns (docs/claims.md)."""
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what vLLM would refuse after half a minute, or what would hang."""
        if self.role is Role.RENDER:
            raise ValueError(f"{self.name}: a render server is not an engine of this kind")
        if self.role is Role.DECODE and not self.prefix_caching:
            raise ValueError(f"{self.name}: a decode node needs its prefix cache; leave it on")
        if self.block_size <= 0 or self.block_size % 32:
            raise ValueError(
                f"{self.name}: vLLM's CPU attention needs a block size that is a multiple of 32, "
                f"not {self.block_size}"
            )
        if self.kv_lease_duration_s < 6:  # vLLM divides it by 6 for its heartbeat, whole seconds
            raise ValueError(f"{self.name}: kv_lease_duration_s must be at least 6")

    @property
    def url(self) -> str:
        """Where it will answer."""
        return f"http://{LOOPBACK}:{self.port}"


def engine_command(spec: EngineSpec) -> list[str]:
    """The command that starts the engine (`vllm serve` does not exist for `vllm-cpu`)."""
    return [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(spec.model)),
        *("--served-model-name", spec.served_model_name),
        *("--host", LOOPBACK),
        *("--port", str(spec.port)),
        *("--dtype", "bfloat16"),
        *("--max-model-len", str(spec.max_model_len)),
        *("--max-num-seqs", str(spec.max_num_seqs)),
        *("--block-size", str(spec.block_size)),
        *("--kv-cache-memory-bytes", str(int(spec.kv_cache_gib * _GIB))),
        *("--kv-transfer-config", json.dumps(kv_transfer_config(spec))),
        "--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching",
        "--enforce-eager",
        "--enable-scale-out",  # the render endpoints answer 403 without it
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *spec.extra_args,
    ]


def kv_transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """NIXL in both directions, on P and on D: a pull sent to an engine without it hangs.

    ``recompute`` in place of ``fail`` makes vLLM 0.32 wait for ever after a failed read from D;
    with ``fail`` the router goes cold.
    """
    connector = {"kv_connector": "NixlConnector"}
    if spec.claims:
        connector = {
            "kv_connector": "KVLoopConnector",
            "kv_connector_module_path": "kvloop.vllm_plugin.connector",
        }
    return {
        **connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": spec.decoder_kv_blocks_ttl_s,
            "kv_lease_duration": spec.kv_lease_duration_s,
            "kv_recompute_threshold": spec.kv_recompute_threshold,
            "num_threads": 1,
        },
    }


def engine_environment(spec: EngineSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's whole environment: the inherited one and what a small machine needs."""
    return {
        **{name: value for name, value in inherited.items() if name not in _NOT_INHERITED},
        **_threads(spec.cores),
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",  # else it listens on the machine's other addresses too
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",  # equal block hashes on all engines
        **spec.extra_env,
    }


def _threads(cores: tuple[int, ...]) -> dict[str, str]:
    """vLLM's own binding moves compute threads only; the rest stays on the other engine's core.

    So the whole process tree is bound by its starter instead, and vLLM is told not to.
    """
    if not cores:
        return {"VLLM_CPU_OMP_THREADS_BIND": "auto"}
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(cores))}
