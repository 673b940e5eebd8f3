"""Which vLLM the claim connector works with.

It overrides methods of vLLM that are not public; a version that it was not tested
with could grant blocks that are not what they are taken for.
"""

from __future__ import annotations

import re
from typing import Final

TESTED: Final = frozenset({(0, 32)})


class UnsupportedVllmError(RuntimeError):
    """This vLLM is not one that the connector was tested with."""


def require(version: str) -> None:
    """Raise UnsupportedVllmError unless ``version`` is one of :data:`TESTED`."""
    found = re.match(r"(\d+)\.(\d+)\b", version)
    if found is None or (int(found[1]), int(found[2])) not in TESTED:
        tested = ", ".join(f"{major}.{minor}" for major, minor in sorted(TESTED))
        raise UnsupportedVllmError(
            f"KVLoopConnector works with vLLM {tested}, and this is {version}. "
            "Use vLLM's NixlConnector here: the router works with both (docs/claims.md)."
        )
