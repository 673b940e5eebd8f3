"""Engines on one machine: for the demo, for tests on real engines, for `kvloop up`.

Importing this package imports no engine, no torch and no transformers.
"""

from kvloop.cluster.cluster import LocalCluster
from kvloop.cluster.engine_spec import EngineSpec, engine_command, engine_environment
from kvloop.cluster.layout import decode_spec, free_ports, one_pair, prefill_spec
from kvloop.cluster.model import ModelUnavailableError, prepare_model
from kvloop.cluster.process import EngineStartError

__all__ = [
    "EngineSpec",
    "EngineStartError",
    "LocalCluster",
    "ModelUnavailableError",
    "decode_spec",
    "engine_command",
    "engine_environment",
    "free_ports",
    "one_pair",
    "prefill_spec",
    "prepare_model",
]
