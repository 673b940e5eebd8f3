"""Releases: only complete references, so that no engine dies of one."""

import json

import pytest

from kvloop.engines.release import release_body
from tests.builders import decode_params


def test_a_release_carries_the_reference_as_a_consumer_would() -> None:
    body = json.loads(release_body(decode_params(an_unknown_field=1)))
    params = body["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["an_unknown_field"] == 1
    assert params["remote_request_id"] == "chatcmpl-1"


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_request_id", "remote_block_ids"])
def test_an_incomplete_reference_is_not_sent(field: str) -> None:
    params = decode_params()
    del params[field]
    with pytest.raises(ValueError, match=field):
        release_body(params)
