"""The claim connector starts with the vLLM that it was tested with, and says so elsewhere."""

import pytest

from kvloop.vllm_plugin.supported_versions import UnsupportedVllmError, require


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.32.0.dev3+cpu", "0.32"])
def test_what_was_tested_is_let_through(version: str) -> None:
    require(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0", "", "dev"])
def test_others_are_refused_with_a_way_out(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=r"works with vLLM 0\.32.*NixlConnector"):
        require(version)
