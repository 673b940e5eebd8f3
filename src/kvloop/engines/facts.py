"""What an engine says of itself over HTTP, read into plain data.

Pure functions over bodies. Names of vLLM's metrics are spelled here and in :mod:`kvloop.wire`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvloop.wire import CLAIM_CONNECTOR, ENGINE_INFO_METRIC

if TYPE_CHECKING:
    from collections.abc import Mapping

_CACHE_INFO: Final = "vllm:cache_config_info"
_PROCESS_START: Final = "process_start_time_seconds"
_NATIVE_STREAM_REFERENCES: Final = (0, 33)
# Earlier ones strand expired pins (vLLM #50789, #58222).
_OLDEST: Final = (0, 32)
_KV_USAGE: Final = "vllm:kv_cache_usage_perc"
_RUNNING: Final = "vllm:num_requests_running"
_WAITING_BY_REASON: Final = "vllm:num_requests_waiting_by_reason"
_FOR_CAPACITY: Final = "capacity"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One life of one engine."""

    started_s: float
    """`process_start_time_seconds`: another value at the same URL is another engine."""
    block_size: int
    """Tokens in a KV block."""
    kv_capacity_tokens: int
    prefix_caching: bool
    models: tuple[dict[str, Any], ...] = ()
    """Entries of ``/v1/models``."""
    plugin: Mapping[str, str] = field(default_factory=dict)
    """Labels of the plugin's info gauge; empty without the plugin."""
    version: str = ""
    """vLLM's version, as ``/version`` gives it."""
    renders: bool = False
    """Whether it turns messages into token ids for us (`--enable-scale-out`)."""

    @property
    def longest_tokens(self) -> int:
        """Of the longest sequence it takes; where it does not say, its whole cache."""
        lengths = [model.get("max_model_len") for model in self.models]
        said = [length for length in lengths if isinstance(length, int)]
        return min(max(said, default=self.kv_capacity_tokens), self.kv_capacity_tokens)

    @property
    def has_plugin(self) -> bool:
        """Whether kvloop's plugin runs in its API server."""
        return bool(self.plugin)

    @property
    def streams_references(self) -> bool:
        """Whether its streams carry KV references: by the plugin, or natively from vLLM 0.33."""
        return self.has_plugin or _at_least(self.version, _NATIVE_STREAM_REFERENCES)

    @property
    def is_supported(self) -> bool:
        """Whether its vLLM is of a version that kvloop relies on; True where it does not say."""
        return not self.version or _at_least(self.version, _OLDEST)

    @property
    def can_pull(self) -> bool:
        """False only where the plugin knows that a pull would wait for ever."""
        return self.plugin.get("bidirectional_kv_xfer", "true") == "true"

    @property
    def claims(self) -> bool:
        """Whether it asks holders for a prompt's prefix, and pins nothing between turns."""
        return self.plugin.get("kv_connector") == CLAIM_CONNECTOR

    @property
    def claim_addresses(self) -> tuple[tuple[str, int], ...]:
        """Where it answers claims, one address for each data-parallel rank."""
        host, ports = self.plugin.get("claim_host"), self.plugin.get("claim_ports", "")
        if not self.claims or not host:
            return ()
        return tuple((host, int(port)) for port in ports.split(",") if port.isdecimal())

    @property
    def model_names(self) -> frozenset[str]:
        """Names under which it serves, adapters included."""
        return frozenset(str(model.get("id")) for model in self.models)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is at one look; sums over its data-parallel ranks."""

    kv_usage: float
    """Share of its KV blocks in use, of the fullest rank."""
    running: int
    waiting: int
    """Requests that wait for room on it, not for a transfer."""


def read_load(body: bytes) -> EngineLoad:
    """Load from the body of ``/metrics``; zeros where it says nothing."""
    by_name: dict[str, list[float]] = {}
    for name, labels, value in _samples(body, (_KV_USAGE, _RUNNING, _WAITING_BY_REASON)):
        if labels.get("reason", _FOR_CAPACITY) == _FOR_CAPACITY:
            by_name.setdefault(name, []).append(value)
    return EngineLoad(
        kv_usage=max(by_name.get(_KV_USAGE, ()), default=0.0),
        running=int(sum(by_name.get(_RUNNING, ()))),
        waiting=int(sum(by_name.get(_WAITING_BY_REASON, ()))),
    )


def read_metrics(body: bytes) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value of the metrics that say what an engine is."""
    return {
        name: (labels, value)
        for name, labels, value in _samples(body, (_CACHE_INFO, _PROCESS_START, ENGINE_INFO_METRIC))
    }


def _samples(body: bytes, names: tuple[str, ...]) -> list[tuple[str, dict[str, str], float]]:
    """Samples of these metrics. Only their lines are parsed: there are thousands."""
    starts = tuple(name.encode() for name in names)
    lines = [line for line in body.splitlines() if line.startswith(starts)]
    text = b"\n".join(lines).decode("utf-8", "replace") + "\n"
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    ]


def read_facts(metrics: bytes, models: bytes, version: bytes, *, renders: bool) -> EngineFacts:
    """Facts from the bodies of ``/metrics``, ``/v1/models`` and ``/version``.

    Raises ValueError when they are not what a vLLM engine with a KV cache says.
    """
    samples = read_metrics(metrics)
    try:
        cache = samples[_CACHE_INFO][0]
        block_size = int(cache["block_size"])
        num_blocks = int(cache["num_gpu_blocks"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"/metrics has no usable {_CACHE_INFO}: {error!r}") from error
    return EngineFacts(
        started_s=started_s(metrics),
        block_size=block_size,
        kv_capacity_tokens=block_size * num_blocks,
        prefix_caching=cache.get("enable_prefix_caching", "True") == "True",
        models=_read_models(models),
        plugin=samples.get(ENGINE_INFO_METRIC, ({}, 0.0))[0],
        version=_read_version(version),
        renders=renders,
    )


def started_s(metrics: bytes) -> float:
    """When the engine's process started, from the body of ``/metrics``; 0 if it does not say."""
    return read_metrics(metrics).get(_PROCESS_START, ({}, 0.0))[1]


def _read_models(body: bytes) -> tuple[dict[str, Any], ...]:
    try:
        listing = msgspec.json.decode(body, type=dict[str, Any])
        return tuple(msgspec.convert(listing.get("data"), list[dict[str, Any]]))
    except msgspec.MsgspecError as error:
        raise ValueError(f"/v1/models is no list of models: {error}") from error


def _read_version(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any]).get("version", ""))
    except msgspec.MsgspecError:
        return ""


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    """Compares major and minor; False for a version that cannot be read."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= wanted
