"""The ledger with a million conversations: lookup time and memory.

Conversations of many lengths are filed as the router files them; then turns that go on, branch off
or are unknown look theirs up. Prints medians and the memory that each conversation takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np

from kvloop.ledger.memory import Ledger
from kvloop.ledger.reference import KVReference
from kvloop.proof.fingerprint import UNIT_TOKENS

_PARAMS = json.dumps(
    {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "6f1c4c1e-6d5c-4c5e-9b0a-1d2f3a4b5c6d",
        "remote_request_id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "remote_host": "10.0.0.17",
        "remote_port": 5601,
        "tp_size": 8,
        "remote_blocks_expiry_time": 123456.789,
    }
).encode()


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def conversation(number: int, tokens: int, boundaries: int) -> KVReference:
    chance = np.random.default_rng(number)
    keys = tuple(random.Random(number * 1000 + turn).randbytes(16) for turn in range(boundaries))
    block_ids = json.dumps([list(range(tokens // 16))]).encode()
    return KVReference(
        reference_id=number,
        decode=f"http://d{number % 24}",
        engine_id="6f1c4c1e-6d5c-4c5e-9b0a-1d2f3a4b5c6d",
        params=_PARAMS + block_ids,
        num_tokens=tokens,
        block_size=16,
        prefixes=chance.integers(0, 2**63, tokens // UNIT_TOKENS, dtype=np.uint64),
        deadline_s=1e9,
        boundaries=keys,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=1024, help="median length")
    parser.add_argument("--lookups", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = random.Random(7)
    ledger = Ledger(options.conversations, max_bytes=2**50)
    gc.collect()
    before, total_tokens, sample = resident_bytes(), 0, {}
    began = time.perf_counter()
    for number in range(1, options.conversations + 1):
        tokens = max(64, int(options.tokens * chance.lognormvariate(0, 0.7)))
        one = conversation(number, tokens, boundaries=1 + tokens // 256)
        ledger.file(one)
        total_tokens += tokens
        if number % (options.conversations // 2000) == 0:
            sample[number] = one
        if number % max(1, options.conversations // 10) == 0:
            print(f"  {number:,} filed after {time.perf_counter() - began:.0f} s", flush=True)
    gc.collect()
    used = resident_bytes() - before
    found_us, missed_us, numbers = [], [], list(sample)
    for _ in range(options.lookups):
        number = chance.choice(numbers)
        entry = sample[number]
        turn = [*entry.boundaries, chance.randbytes(16)]
        start = time.perf_counter()
        found = ledger.find(turn, entry.prefixes, 0.0)
        found_us.append((time.perf_counter() - start) * 1e6)
        assert found.candidates[0].reference is entry
        unknown = [chance.randbytes(16) for _ in turn]
        start = time.perf_counter()
        ledger.find(unknown, entry.prefixes, 0.0)
        missed_us.append((time.perf_counter() - start) * 1e6)
    each = used / options.conversations
    mean_tokens = total_tokens / options.conversations
    figures = {
        "conversations": options.conversations,
        "mean_tokens": round(mean_tokens),
        "bytes_each": round(each),
        "bytes_each_as_accounted": round(ledger.num_bytes / options.conversations),
        "bytes_allowed_each": round(2048 + mean_tokens),
        "find_p50_us": round(statistics.median(found_us), 1),
        "find_p99_us": round(statistics.quantiles(found_us, n=100)[98], 1),
        "miss_p50_us": round(statistics.median(missed_us), 1),
    }
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
