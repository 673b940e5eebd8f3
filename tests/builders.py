"""Builders of plain data for tests: every field has a sensible value, tests name what matters."""

from __future__ import annotations

from typing import Any

import msgspec

from kvloop.ledger.reference import KVReference
from kvloop.proof.fingerprint import Fingerprinter

FINGERPRINTER = Fingerprinter(b"a secret only for tests")


def decode_params(num_tokens: int = 64, block_size: int = 16, **fields: Any) -> dict[str, Any]:
    """D's ``kv_transfer_params`` after a turn, as vLLM 0.32 gives them."""
    num_blocks = -(-num_tokens // block_size)
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(100, 100 + num_blocks))],
        "remote_engine_id": "engine-d",
        "remote_request_id": "chatcmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": 1000.0,
        "transfer_mode": "pull",
        **fields,
    }


def reference(
    reference_id: int,
    token_ids: list[int],
    *,
    boundaries: tuple[bytes, ...] = (b"boundary",),
    deadline_s: float = 100.0,
    decode: str = "http://d",
    engine_id: str = "engine-d",
    conversation: str | None = None,
    num_tokens: int | None = None,
    continued: bool = False,
) -> KVReference:
    """A reference whose proof covers ``token_ids``."""
    retained = len(token_ids) if num_tokens is None else num_tokens
    return KVReference(
        reference_id=reference_id,
        decode=decode,
        engine_id=engine_id,
        params=msgspec.json.encode(decode_params(max(retained, 1))),
        num_tokens=retained,
        block_size=16,
        prefixes=FINGERPRINTER.prefixes(token_ids),
        deadline_s=deadline_s,
        boundaries=boundaries,
        conversation=conversation,
        continued=continued,
    )
