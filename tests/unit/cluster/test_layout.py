from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvloop.cluster import layout
from kvloop.cluster.layout import decode_spec, free_ports, one_pair, prefill_spec, share_cores
from kvloop.engines.fleet import Role

MODEL = Path("/models/small")


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_free_ports_are_none_that_the_kernel_hands_out_by_itself() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not set(free_ports(50)) & set(range(first, last + 1))


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setattr(layout, "_first_ephemeral_port", lambda: held.getsockname()[1] + 1)
        monkeypatch.setattr(layout, "_NUM_CANDIDATES", 1)
        with pytest.raises(OSError, match="found 0 free ports"):
            free_ports(1)


def test_on_two_cores_each_engine_has_its_own() -> None:
    assert share_cores([0, 1], 2) == [(0,), (1,)]


def test_more_cores_are_shared_out_without_overlap() -> None:
    assert share_cores([0, 1, 4, 5, 6], 2) == [(0, 1), (4, 5)]


def test_a_large_machine_does_not_give_a_small_model_all_its_cores() -> None:
    first, second = share_cores(range(96), 2)
    assert len(first) == len(second) == 8
    assert not set(first) & set(second)


def test_with_fewer_cores_than_engines_none_is_bound() -> None:
    assert share_cores([0], 2) == [(), ()]


def test_a_prefill_node_has_no_prefix_cache_unless_asked_and_a_decode_node_has_one() -> None:
    assert not prefill_spec(MODEL).prefix_caching
    assert prefill_spec(MODEL, prefix_caching=True).prefix_caching
    assert decode_spec(MODEL).prefix_caching


def test_given_ports_and_settings_are_kept() -> None:
    made = decode_spec(MODEL, name="decode-7", port=1234, decoder_kv_blocks_ttl_s=9)
    assert (made.name, made.port, made.decoder_kv_blocks_ttl_s) == ("decode-7", 1234, 9)


def test_the_pair_is_a_p_and_a_d_on_different_ports_and_cores() -> None:
    prefill, decode = one_pair(MODEL, block_size=64)
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    ports = {spec.port for spec in (prefill, decode)}
    ports |= {spec.side_channel_port for spec in (prefill, decode)}
    assert len(ports) == 4
    assert not set(prefill.cores) & set(decode.cores)
    assert set(prefill.cores) | set(decode.cores) <= os.sched_getaffinity(0)
    assert prefill.block_size == decode.block_size == 64
