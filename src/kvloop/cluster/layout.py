"""Which engines a machine gets: ports and cores, and the usual pair of P and D.

Nothing here starts anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final

from kvloop.cluster.engine_spec import LOOPBACK, EngineSpec
from kvloop.engines.fleet import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_CANDIDATES: Final = 8_000
_LAST_PORT: Final = 65_535
_MAX_CORES_PER_ENGINE: Final = 8
"""More threads cost a model of this size more in waiting for each other than they compute."""


def free_ports(num_ports: int) -> list[int]:
    """Ports on loopback that nobody uses now, all different.

    Taken from below those that the kernel hands out by itself: an engine binds its side channel
    only after half a minute, and the many sockets of the engines that start beside it would
    otherwise be given that very port now and then.
    """
    candidates = list(range(max(1024, _first_ephemeral_port() - _NUM_CANDIDATES), _LAST_PORT))
    candidates = candidates[:_NUM_CANDIDATES]
    SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == num_ports:
            break
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind((LOOPBACK, port))
            found.append(port)
    if len(found) < num_ports:
        raise OSError(f"found {len(found)} free ports on {LOOPBACK}, need {num_ports}")
    return found


def _first_ephemeral_port() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def share_cores(cores: Sequence[int], num_engines: int) -> list[tuple[int, ...]]:
    """Each engine's cores, none shared; empty (no binding) where there are too few.

    Two cores and two engines: core 0 for the first, core 1 for the second.
    """
    each = min(len(cores) // num_engines, _MAX_CORES_PER_ENGINE)
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(num_engines)]


def prefill_spec(model: Path, *, name: str = "prefill-0", **settings: Any) -> EngineSpec:
    """A P on free ports, without prefix cache unless ``settings`` (EngineSpec's fields) say so.

    P has none as in AWS's measurement: it stands for a P whose cache was evicted, that was
    restarted, or that is another P than last turn's.
    """
    return _spec(Role.PREFILL, model, name, {"prefix_caching": False, **settings})


def decode_spec(model: Path, *, name: str = "decode-0", **settings: Any) -> EngineSpec:
    """A D on free ports; ``settings`` are EngineSpec's fields."""
    return _spec(Role.DECODE, model, name, settings)


def one_pair(model: Path, **settings: Any) -> list[EngineSpec]:
    """One P without prefix cache and one D, which share this machine's cores between them."""
    first, second = share_cores(sorted(os.sched_getaffinity(0)), 2)
    a, b, c, d = free_ports(4)
    return [
        prefill_spec(model, **{"cores": first, "port": a, "side_channel_port": b, **settings}),
        decode_spec(model, **{"cores": second, "port": c, "side_channel_port": d, **settings}),
    ]


def _spec(role: Role, model: Path, name: str, settings: dict[str, Any]) -> EngineSpec:
    port, side_channel_port = free_ports(2)
    ports = {"port": port, "side_channel_port": side_channel_port}
    return EngineSpec(name=name, role=role, model=model, **{**ports, **settings})
