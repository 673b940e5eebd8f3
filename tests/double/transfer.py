"""References as vLLM 0.32's pull connector takes, gives and drops them.

Follows ``nixl/pull_scheduler.py`` and ``nixl/base_worker.py``.

It compares no tokens: which blocks are read follows from counts alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tests.double.exchange import ORIGIN
from tests.double.fabric import Handover, HangError, LoadFailedError
from tests.double.kv import RUBBISH, Pin, Seed

if TYPE_CHECKING:
    from tests.double.engine import Engine, Sequence

EXPIRY_MARGIN_S = 5.0
_WHERE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def pull(
    engine: Engine, asked: dict[str, Any], prompt: list[int], table: list[int], seed: Seed
) -> int:
    """Read what the request's reference offers into its table; the number of tokens read.

    Raises LoadFailedError, HangError, and DiedError for what kills an engine.
    """
    if asked.get("kvloop_claim_holders") and engine.claims:
        return _claim(engine, asked, prompt, table, seed)
    blocks = asked.get("remote_block_ids")
    complete = all(name in asked for name in _WHERE)
    from_prefill = bool(asked.get("do_remote_prefill"))
    from_decode = bool(asked.get("do_remote_decode")) and bool(blocks) and complete
    if not from_prefill and not from_decode:
        return 0
    num_tokens = _offered(asked, prompt, from_prefill=from_prefill)
    num_tokens -= len(table) * engine.block_size
    if num_tokens <= 0 or (not from_prefill and num_tokens < engine.kv_recompute_threshold):
        if blocks and complete and (from_prefill or engine.bidirectional):
            notify(engine, asked)
        return 0
    engine.counters.external_queries += len(prompt)
    if from_prefill and not blocks:
        engine.die()  # update_state_after_alloc asserts that nothing was to be loaded
    if not complete or not (from_prefill or engine.bidirectional):
        raise HangError
    _read(engine, asked, table, num_tokens)
    return num_tokens


def _claim(
    engine: Engine, asked: dict[str, Any], prompt: list[int], table: list[int], seed: Seed
) -> int:
    """Ask holders by block hash, as kvloop's connector does, and read the longest grant."""
    wanted = ((len(prompt) - 1) // engine.block_size - len(table)) * engine.block_size
    best, reasons = None, []
    for holder in (engine.fabric.at(*address) for address in asked["kvloop_claim_holders"]):
        held: list[int] = []
        if holder is None:
            reasons.append("timeout")
        elif not holder.prefix_caching or holder.block_size != engine.block_size:
            reasons.append("no_prefix_cache" if not holder.prefix_caching else "block_size")
        else:
            held = holder.memory.lookup(seed, prompt)[len(table) :]
        if held and holder is not None and (best is None or len(held) > len(best[1])):
            best = holder, held
    report = {"asked_tokens": wanted, "granted_tokens": 0, "why": "below_threshold"}
    asked["kvloop_claim"] = report
    if wanted < max(1, engine.kv_recompute_threshold):
        return 0
    num_tokens = len(best[1]) * engine.block_size if best else 0
    if best is None or num_tokens < max(1, engine.kv_recompute_threshold):
        report["why"] = "too_little" if best else ",".join(sorted(set(reasons or ["miss"])))
        return 0
    for block in best[1]:
        engine.memory.copy_in(table, best[0].memory, block)
    report |= {"granted_tokens": num_tokens, "why": "granted"}
    engine.fabric.read_tokens += num_tokens
    engine.counters.transfers += 1
    engine.counters.bytes_read += num_tokens * engine.bytes_per_token
    return num_tokens


def _offered(asked: dict[str, Any], prompt: list[int], *, from_prefill: bool) -> int:
    if from_prefill:  # P has all of the prompt, whatever its reference says
        return len(prompt)
    return min(asked.get("remote_num_tokens") or 0, len(prompt))


def _read(engine: Engine, asked: dict[str, Any], table: list[int], num_tokens: int) -> None:
    producer = reach(engine, asked)
    if producer is None:
        engine.counters.failed_transfers += 1
        raise LoadFailedError
    expiry_s = asked.get("remote_blocks_expiry_time")
    if expiry_s is not None and expiry_s - EXPIRY_MARGIN_S <= producer.now_s:
        engine.counters.expired_requests += 1
        raise LoadFailedError  # and the producer hears nothing: its pin stays
    needed = math.ceil(num_tokens / engine.block_size)
    remote: list[int] = asked["remote_block_ids"][0]
    if needed > len(remote):
        engine.die()  # _apply_prefix_caching asserts that there are enough
    producer.expire()
    request_id = asked["remote_request_id"]
    pin = producer.memory.pins.get(request_id)
    produced_for = pin.origin if pin is not None else ""
    engine.fabric.handovers.append(
        Handover(producer.engine_id, request_id, produced_for, ORIGIN.get(), pin is not None)
    )
    for block in remote[-needed:]:
        engine.memory.copy_in(table, producer.memory, block)
        if engine.spoils_reads:
            engine.memory.blocks[table[-1]].kv = [RUBBISH] * engine.block_size
    engine.fabric.read_tokens += num_tokens
    engine.counters.external_hits += num_tokens
    engine.counters.transfers += 1
    engine.counters.bytes_read += needed * engine.block_size * engine.bytes_per_token
    producer.notified(asked["remote_request_id"])


def reach(engine: Engine, asked: dict[str, Any]) -> Engine | None:
    """The engine that a reference points at; None if it cannot be reached.

    Engines shake hands once: after that host and port are not looked at.
    """
    engine_id = asked.get("remote_engine_id", "")
    producer = engine.fabric.find(asked)
    if producer is not None:
        engine.met.add(engine_id)
    elif engine_id in engine.met:
        producer = engine.fabric.engines.get(engine_id)
    return None if producer is None or producer.dead else producer


def notify(engine: Engine, asked: dict[str, Any]) -> None:
    """Tell the producer that its blocks are not needed (any more)."""
    producer = reach(engine, asked)
    if producer is not None:
        producer.notified(asked["remote_request_id"])
    elif asked["remote_engine_id"] not in engine.met:
        engine.counters.failed_transfers += 1  # a handshake, for a notice as well


def reject(engine: Engine, asked: Any) -> None:
    """The request ends before it is scheduled: vLLM then frees the producer's blocks."""
    if engine.dead or not isinstance(asked, dict) or not asked.get("do_remote_prefill"):
        return
    if not all(name in asked for name in _WHERE):
        engine.dead = True  # KeyError in build_connector_meta, behind the answer
        return
    notify(engine, asked)


def heartbeat(engine: Engine, asked: dict[str, Any] | None) -> None:
    """While D has a request waiting, it renews P's lease on the blocks."""
    if not asked or not asked.get("do_remote_prefill"):
        return
    producer = reach(engine, asked)
    pin = producer.memory.pins.get(asked["remote_request_id"]) if producer else None
    if producer is not None and pin is not None:
        pin.ends_s = max(pin.ends_s, producer.now_s + producer.lease_s)


def keep(engine: Engine, sequence: Sequence) -> dict[str, Any] | None:
    """Pin a finished request's blocks and say where they are; or free them."""
    asked, table = sequence.asked, sequence.table
    is_prefill = bool(asked.get("do_remote_decode"))
    if not asked or not (is_prefill or (engine.bidirectional and not engine.claims)):
        engine.memory.release(table)
        return None
    # Only these two put a request among those that the worker tracks; others' blocks leak.
    tracked = is_prefill or bool(asked.get("do_remote_prefill"))
    ends_s = engine.now_s + (engine.lease_s if is_prefill else engine.ttl_s)
    num_tokens = sequence.num_computed
    engine.memory.pin(sequence.request_id, Pin(table, ends_s, num_tokens, tracked, sequence.origin))
    given: dict[str, Any] = {
        "do_remote_prefill": is_prefill,
        "do_remote_decode": not is_prefill,
        "remote_block_ids": [[*table, *([0] * engine.extra_exported_blocks)]],
        "remote_engine_id": engine.engine_id,
        "remote_request_id": sequence.request_id,
        "remote_host": engine.side_host,
        "remote_port": engine.side_port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None if is_prefill else ends_s,
        "transfer_mode": "pull",
    }
    if "kvloop_claim" in asked:
        given["kvloop_claim"] = asked["kvloop_claim"]
    if is_prefill and len(sequence.output) == 1:  # vLLM has the count at the first token only
        given["remote_prefill_cached_tokens"] = sequence.cached_tokens
    return given
