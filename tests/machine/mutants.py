"""``python -m tests.machine.mutants``: each guard of the router is taken out in turn.

A mutant is the router's source with one exact text replaced, in a copy; the machine runs on it with
the same seeds as on the router itself, and must find it. What is not found is either a machine that
is too weak or a guard that guards nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One guard, and the router without it."""

    name: str
    what: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "proof",
        "every token of a reference is taken to be this prompt's",
        "turn/plan.py",
        "            candidate.common_tokens, reference.num_tokens,",
        "            reference.num_tokens, reference.num_tokens,",
    ),
    Mutant(
        "trim",
        "the reference is attached as D gave it",
        "turn/plan.py",
        "attach = trim(claimed.params, route.num_tokens, claimed.reference.block_size)",
        "attach = claimed.params; trim(attach, route.num_tokens, claimed.reference.block_size)",
    ),
    Mutant(
        "trim-count",
        "the block list is cut, the token count is not",
        "proof/trim.py",
        "REMOTE_BLOCK_IDS: [blocks[:num_blocks]], REMOTE_NUM_TOKENS: num_tokens}",
        "REMOTE_BLOCK_IDS: [blocks[:num_blocks]]}",
    ),
    Mutant(
        "claim-once",
        "a claimed reference stays in the ledger",
        "ledger/memory.py",
        "        entry.reference = None\n",
        "        return ClaimedReference(reference)\n",
    ),
    Mutant(
        "deadline",
        "references never end for the router",
        "ledger/deadline.py",
        "return latest_s - self.margin_s",
        "return latest_s + 1e6",
    ),
    Mutant(
        "margin",
        "references are used up to, and a little after, their very end",
        "ledger/deadline.py",
        "return latest_s - self.margin_s",
        "return latest_s + 5.0",
    ),
    Mutant(
        "tenant",
        "tenants share",
        "turn/request.py",
        "            tenant=self.tenant,\n            api",
        '            tenant="",\n            api',
    ),
    Mutant(
        "model",
        "adapters share",
        "turn/request.py",
        'model=self.model or "",',
        'model="",',
    ),
    Mutant(
        "salt",
        "cache salts share",
        "turn/request.py",
        'cache_salt=self.body.get("cache_salt"),',
        "cache_salt=None,",
    ),
    Mutant(
        "restart",
        "a restarted engine's references live on",
        "turn/restarts.py",
        "dropped = services.ledger.drop_engine(engine.url, keep_engine_id=engine_id)",
        "dropped = []",
    ),
    Mutant(
        "cold-retry",
        "a refused pull fails its turn",
        "turn/prefill_leg.py",
        '            receipt.route = "recompute"\n',
        '            raise TurnFailedError(502, "The pull was refused.")\n',
    ),
    Mutant(
        "counted-prompt",
        "P's own count of the prompt is not looked at",
        "turn/plan.py",
        "return prompt_tokens is None or prompt_tokens == len(self.ids)",
        "return True",
    ),
    Mutant(
        "client-params",
        "clients set kv_transfer_params",
        "turn/request.py",
        "    body.pop(KV_PARAMS, None)\n",
        "",
    ),
    Mutant(
        "client-xargs",
        "clients reach the connector through vllm_xargs",
        "turn/request.py",
        "        extra.pop(KV_PARAMS, None)\n",
        "        extra.get(KV_PARAMS, None)\n",
    ),
    Mutant(
        "reference-event",
        "the reference goes on to the client",
        "turn/answer_stream.py",
        '            return b""\n',
        "            return event\n",
    ),
    Mutant(
        "several-sequences",
        "n > 1 goes through P",
        "turn/request.py",
        '            return "several_sequences"\n',
        "            pass\n",
    ),
    Mutant(
        "release",
        "what is of no more use stays pinned",
        "turn/releasing.py",
        "    services.pins.move(pin_id, PinState.LEAVING)\n",
        "    return\n",
    ),
    Mutant(
        "budget",
        "pins have no budget",
        "ledger/retention.py",
        "over = pinned - int(capacity * budget_share)",
        "over = 0",
    ),
    Mutant(
        "read-is-gone",
        "what P has read is still counted as pinned",
        "turn/attachment.py",
        "            self._services.pins.gone(self._claimed.reference_id)\n",
        "            pass\n",
    ),
    Mutant(
        "orphans",
        "a P whose client has left keeps its blocks",
        "turn/prefill_leg.py",
        "        services.orphans.adopt(leg, left)\n",
        "        leg.add_done_callback(lambda done: done.exception())\n",
    ),
)


def _source_with(mutant: Mutant | None, root: Path) -> Path:
    """A copy of the router's source, with the mutant's text replaced. Raises ValueError."""
    shutil.copytree(ROOT / "src" / "kvloop", root / "kvloop")
    if mutant is not None:
        file = root / "kvloop" / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            count = text.count(mutant.old)
            raise ValueError(f"mutant {mutant.name}: its text is {count} times in {mutant.file}")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return root


def judge(mutant: Mutant | None, seed: int, turns: int) -> tuple[str, str]:
    """When and by what a mutant was caught."""
    with tempfile.TemporaryDirectory() as folder:
        path = _source_with(mutant, Path(folder))
        command = [sys.executable, "-m", "tests.machine", "--no-shrink", "--jobs", "1"]
        command += ["--seed", str(seed), "--turns", str(turns)]
        environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    count = re.search(r"^([\d,]+) turns in (\d+) worlds", done.stdout, re.MULTILINE)
    caught = re.search(r"^seed \d+: (\w+): (.*)", done.stdout, re.MULTILINE)
    if count is None:
        raise RuntimeError(f"{mutant}: {done.stdout[-500:]} {done.stderr[-2000:]}")
    return count[1], "" if caught is None else f"{caught[1]}: {caught[2]}"


def table(seed: int, turns: int, jobs: int) -> Iterator[str]:
    """The rows of the table, as Markdown."""
    yield "| mutant | without the guard | right worlds' turns before | caught by |"
    yield "|---|---|---|---|"
    everyone: list[Mutant | None] = [None, *MUTANTS]
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda one: judge(one, seed, turns), everyone)
        for mutant, (count, caught) in zip(everyone, verdicts, strict=True):
            name = "(none)" if mutant is None else mutant.name
            what = "the router as it is" if mutant is None else mutant.what
            yield f"| {name} | {what} | {count} | {_shortened(caught) or 'nothing'} |"


def _shortened(caught: str) -> str:
    words = re.sub(r"turn-\d+|\[[^\]]*\]|Turn\(.*|http://", "", caught).replace("|", "/")
    return re.sub(r"\s+", " ", words)[:110]


def main() -> int:
    """0 if the router passes and every mutant is caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.machine.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int, default=6_000, help="at most so many for each mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    uncaught = []
    for row in table(options.seed, options.turns, options.jobs):
        print(row, flush=True)
        is_mutant = not row.startswith(("| (none)", "| mutant", "|---"))
        if is_mutant == row.endswith("| nothing |"):
            uncaught.append(row)
    rows = [row for row in uncaught if not row.startswith(("| mutant", "|---"))]
    print(f"{len(MUTANTS) - len(rows)} of {len(MUTANTS)} mutants caught")
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
