"""The scheduler side of :class:`kvloop.vllm_plugin.connector.KVLoopConnector`.

All of this runs on the thread of vLLM's engine loop; the claim protocol's sockets have their own
(:mod:`kvloop.vllm_plugin.claims.endpoint`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvloop.vllm_plugin import engine_loop
from kvloop.vllm_plugin.claims.claimant import Claimant, Granted, Refused
from kvloop.vllm_plugin.claims.endpoint import Endpoint
from kvloop.vllm_plugin.claims.holder import Holder, Whereabouts
from kvloop.vllm_plugin.claims.leases import Leases
from kvloop.vllm_plugin.claims.messages import Terms, Wire, seed_fingerprint
from kvloop.vllm_plugin.connector_stats import ClaimStats
from kvloop.wire import (
    CLAIM_HOLDERS,
    CLAIM_PORT_OFFSET,
    CLAIM_REPORT,
    CLAIM_REQUEST_PREFIX,
    claim_report,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvloop.vllm_plugin.claims.claimant import Address

logger = logging.getLogger("vllm.kvloop")

_MAX_LEASED_SHARE: Final = 0.5
"""Of the block pool; more is refused as `busy`."""
_ASKED: Final = "_kvloop_asked"
"""Key in a request's own ``kv_transfer_params``."""
_ORDINARY_REASONS: Final = frozenset({"miss", "busy", "stopping"})
_MAX_HOLDERS: Final = 3
"""Engines asked for one request."""


class _Pool:
    """vLLM's block pool, as leases use it."""

    def __init__(self, pool: BlockPool, group_ids: list[int]) -> None:
        self._pool = pool
        self._group_ids = group_ids

    def find(self, block_hash: bytes) -> Sequence[KVCacheBlock] | None:
        blocks: Sequence[KVCacheBlock] | None = self._pool.get_cached_block(
            block_hash, self._group_ids
        )
        return blocks

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool.touch(blocks)

    def let_go(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool.free_blocks(blocks)


@dataclass(frozen=True, slots=True)
class _Sides:
    """What an engine with a block pool has of the claim protocol."""

    endpoint: Endpoint
    holder: Holder[KVCacheBlock]
    claimant: Claimant


class ClaimingScheduler(NixlPullConnectorScheduler):
    """Asks for a prompt's prefix where the router says that it may be; answers who asks here."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        rank = vllm_config.parallel_config.data_parallel_index
        first_port = self.side_channel_port - rank + CLAIM_PORT_OFFSET
        self._claim_port = int(extra("kvloop_claim_port", first_port)) + rank
        self._deadline_s = float(extra("kvloop_claim_deadline_s", 0.5))
        self._secret = str(extra("kvloop_claim_secret", ""))
        self._said: set[str] = set()
        self._stats = ClaimStats()
        self._reading: dict[str, int] = {}
        """Tokens that requests are reading by claim."""
        self._pool: BlockPool | None = None
        self._sides: _Sides | None = None
        """None until vLLM's engine core is complete."""

    # --- as a holder -----------------------------------------------------------------------------

    def grant_from(self, pool: BlockPool) -> None:
        """vLLM has made its block pool; claims are served once its engine core is complete."""
        self._pool = pool
        engine_loop.welcome(self)

    def attached(self, loop: engine_loop.EngineLoop) -> None:
        """Listen; see :class:`kvloop.vllm_plugin.engine_loop.Visitor`."""
        if self._pool is None:
            return
        # Not before: the hash that chains start from exists only now.
        terms = _terms(self.vllm_config, self.kv_cache_config)
        endpoint = Endpoint(self.side_channel_host, self._claim_port, Wire(self._secret), loop.wake)
        group_ids = list(range(len(self.kv_cache_config.kv_cache_groups)))
        max_blocks = int(self._pool.num_gpu_blocks * _MAX_LEASED_SHARE)
        holder = Holder(
            terms,
            self._whereabouts(),
            Leases(_Pool(self._pool, group_ids), max_blocks),
            lambda block: int(block.block_id),
            endpoint.reply,
            refuses_all=_why_not(self.vllm_config, self.kv_cache_config),
        )
        claimant = Claimant(self.engine_id, terms, endpoint.send, deadline_s=self._deadline_s)
        self._sides = _Sides(endpoint, holder, claimant)
        logger.info("kvloop: claims are answered on port %d", endpoint.port)

    def _whereabouts(self) -> Whereabouts:
        parallel = self.vllm_config.parallel_config
        return Whereabouts(
            self.engine_id,
            self.side_channel_host,
            self.side_channel_port,
            self.transfer_tp_size,
            parallel.decode_context_parallel_size,
            parallel.pipeline_parallel_size,
        )

    def visit(self, loop: engine_loop.EngineLoop) -> None:
        """Work on what has come in; see :class:`kvloop.vllm_plugin.engine_loop.Visitor`."""
        if self._sides is None:
            return
        endpoint, holder = self._sides.endpoint, self._sides.holder
        now_s, in_flight = time.monotonic(), loop.steps_in_flight()
        while endpoint.claims:
            peer, message = endpoint.claims.popleft()
            holder.received(peer, message, in_flight, now_s)
        holder.confirm(in_flight)
        holder.expire(now_s)
        endpoint.next_end_s = holder.next_end_s
        if holder.waits_for_steps:
            loop.wake()  # again after the next step

    # --- as a claimant ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What a holder has granted; ``None`` while its answer is awaited."""
        params, sides = request.kv_transfer_params, self._sides
        if sides is None or not params or not params.get(CLAIM_HOLDERS):
            matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            return matched
        self._take_answers(sides)
        if not params.get(_ASKED):
            params[_ASKED] = self._ask(sides.claimant, request, num_computed_tokens, params)
            if not params[_ASKED]:
                del params[CLAIM_HOLDERS]  # what P itself holds and lacks will not change much
                return 0, False
        outcome = sides.claimant.outcome(request.request_id, time.monotonic())
        if outcome is None:
            return None, False
        if isinstance(outcome, Refused):
            self._say(outcome.reasons)
            self._stats.data["claims_missed"] += outcome.reasons
            params[CLAIM_REPORT]["why"] = ",".join(sorted(set(outcome.reasons)))
            del params[CLAIM_HOLDERS]
            return 0, False
        return self._use(request.request_id, params, outcome, num_computed_tokens)

    def _ask(
        self,
        claimant: Claimant,
        request: Request,
        num_computed_tokens: int,
        params: dict[str, Any],
    ) -> bool:
        """Ask; False if there is nothing that would be worth it."""
        first = num_computed_tokens // self.block_size
        # The last prompt token is computed in any case: its logits start the answer.
        end = (request.num_prompt_tokens - 1) // self.block_size
        wanted = (end - first) * self.block_size
        params[CLAIM_REPORT] = claim_report(wanted, 0, "below_threshold")
        if wanted < max(1, self.kv_recompute_threshold):
            return False
        addresses = _addresses(params[CLAIM_HOLDERS])[:_MAX_HOLDERS]
        params[CLAIM_REPORT]["why"] = "no_holder"
        hashes = [bytes(one) for one in request.block_hashes[first:end]]
        if not addresses or not hashes:
            return False
        claimant.ask(request.request_id, addresses, first, hashes, time.monotonic())
        self._stats.data["claims_asked"].append(1)
        return True

    def _use(
        self, request_id: str, params: dict[str, Any], granted: Granted, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Make of a grant what vLLM takes for a reference of D's."""
        count = granted.end * self.block_size - num_computed_tokens
        reaches_back = granted.first * self.block_size <= num_computed_tokens
        was_read = bool(params.get("_remote_blocks_processed"))  # and the read has failed
        if was_read or not reaches_back or count < max(1, self.kv_recompute_threshold):
            self._over(request_id)
            params[CLAIM_REPORT]["why"] = "read_failed" if was_read else "too_little"
            del params[CLAIM_HOLDERS]
            return 0, False
        grant = granted.grant
        if request_id not in self._reading:  # else it is asked again, for want of room
            self._stats.data["claim_latency"].append(granted.claim_s)
        self._reading[request_id] = count
        params[CLAIM_REPORT] = claim_report(params[CLAIM_REPORT]["asked_tokens"], count, "granted")
        params.update(
            remote_block_ids=grant.block_ids,
            remote_engine_id=grant.engine_id,
            remote_request_id=f"{CLAIM_REQUEST_PREFIX}{grant.claim_id.hex()}",
            remote_host=grant.host,
            remote_port=grant.port,
            remote_num_tokens=granted.end * self.block_size,
            tp_size=grant.tp_size,
            dcp_size=grant.dcp_size,
            pp_size=grant.pp_size,
            remote_blocks_expiry_time=None,
        )
        return count, True

    def _say(self, reasons: tuple[str, ...]) -> None:
        """Each reason that only an operator can do something about, once."""
        for reason in set(reasons) - _ORDINARY_REASONS - self._said:
            self._said.add(reason)
            logger.warning("kvloop: claims are refused: %s (docs/claims.md)", reason)

    def _take_answers(self, sides: _Sides) -> None:
        now_s = time.monotonic()
        while sides.endpoint.answers:
            address, message = sides.endpoint.answers.popleft()
            sides.claimant.received(address, message, now_s)
        sides.claimant.renew(now_s)

    def take_stats(self) -> ClaimStats | None:
        """What claims have come to since the last call; None if there is nothing new."""
        if self._sides is not None:
            self._stats.held(self._sides.holder.take_counts(), self.block_size)
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ClaimStats()
        return taken

    def _over(self, request_id: str) -> None:
        self._reading.pop(request_id, None)
        if self._sides is not None:
            self._sides.claimant.over(request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """As vLLM's; leases of reads that go on are renewed."""
        if self._sides is not None and len(self._sides.claimant):
            self._take_answers(self._sides)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; what was read is given back at once."""
        for request_id in connector_output.finished_recving or ():
            if request_id in self._reading:
                self._stats.data["claimed_tokens_read"].append(self._reading[request_id])
            self._over(request_id)
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """P keeps its blocks for D, as in vLLM; D pins nothing: it will be asked."""
        self._over(request.request_id)
        params = request.kv_transfer_params
        if params and not params.get("do_remote_decode") and not params.get("do_remote_prefill"):
            self._stop_heartbeat(request.request_id)
            self._reqs_not_processed.add(request.request_id)
            return False, None
        delay_free, given = super().request_finished(request, block_ids)
        if given is not None and params and CLAIM_REPORT in params:
            given[CLAIM_REPORT] = params[CLAIM_REPORT]
        return delay_free, given

    def shutdown(self) -> None:
        """Close the sockets, too."""
        if self._sides is not None:
            self._sides.endpoint.close()
        super().shutdown()


def _terms(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Terms:
    cache = vllm_config.cache_config
    return Terms(
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        seed_fingerprint=seed_fingerprint(bytes(kv_cache_utils.NONE_HASH)),
        block_size=int(cache.block_size),
        num_groups=len(kv_cache_config.kv_cache_groups),
        compatibility=compute_nixl_compatibility_hash(vllm_config, ""),
    )


def _why_not(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this engine can grant nothing, if so."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "no_prefix_cache"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        return "groups"
    return None


def _addresses(holders: Any) -> list[Address]:
    """Host and port of each holder that the router names; what is malformed is left out."""
    found: list[Address] = []
    for holder in holders if isinstance(holders, list) else ():
        match holder:
            case [str(host), int(port)] if 0 < port < 65536:
                found.append((host, port))
    return found
