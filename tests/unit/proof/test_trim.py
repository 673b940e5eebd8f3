"""Trimming: whole blocks that are proven, count and list together, or nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.proof.trim import reusable_tokens, trim, unusable_reason
from tests.builders import decode_params


@given(
    common=st.integers(0, 5000),
    retained=st.integers(1, 5000),
    prompt=st.integers(1, 5000),
    block_size=st.sampled_from([16, 32, 128]),
)
def test_reusable_tokens_are_proven_retained_whole_and_leave_one_to_compute(
    common: int, retained: int, prompt: int, block_size: int
) -> None:
    tokens = reusable_tokens(common, retained, prompt, block_size)
    assert tokens % block_size == 0
    assert 0 <= tokens <= min(common, retained)
    assert tokens < prompt
    assert min(common, retained, prompt - 1) - tokens < block_size


@given(num_tokens=st.integers(16, 2000), data=st.data())
def test_trim_cuts_the_count_and_the_list_together(num_tokens: int, data: st.DataObject) -> None:
    params = decode_params(num_tokens, an_unknown_field={"kept": True})
    keep = data.draw(st.integers(1, num_tokens // 16))
    trimmed = trim(params, keep * 16, 16)
    assert trimmed["remote_num_tokens"] == keep * 16
    assert trimmed["remote_block_ids"] == [params["remote_block_ids"][0][:keep]]
    rest = {"remote_num_tokens", "remote_block_ids"}
    assert {k: v for k, v in trimmed.items() if k not in rest} == {
        k: v for k, v in params.items() if k not in rest
    }


def test_k04_one_block_too_many_from_speculative_decoding_is_clipped() -> None:
    params = decode_params(64, remote_block_ids=[[1, 2, 3, 4, 5]])
    assert trim(params, 64, 16)["remote_block_ids"] == [[1, 2, 3, 4]]


@pytest.mark.parametrize("num_tokens", [0, 15, 17, 80, -16])
def test_trim_refuses_what_is_not_there(num_tokens: int) -> None:
    with pytest.raises(ValueError, match="cannot trim"):
        trim(decode_params(64), num_tokens, 16)


def test_trim_does_not_touch_its_input() -> None:
    params = decode_params(64)
    trim(params, 16, 16)
    assert params == decode_params(64)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("a string", "not_an_object"),
        (None, "not_an_object"),
        (decode_params(remote_block_ids=None), "missing_field"),
        (decode_params(remote_block_ids=[]), "missing_field"),
        (decode_params(remote_engine_id=None), "missing_field"),
        (decode_params(remote_port=None), "missing_field"),
        (decode_params(remote_block_ids=[1, 2]), "malformed_blocks"),
        (decode_params(remote_num_tokens="64"), "malformed_num_tokens"),
        (decode_params(remote_num_tokens=-1), "malformed_num_tokens"),
        (decode_params(remote_block_ids=[[1, 2, 3, 4], [5]]), "several_kv_cache_groups"),
        (decode_params(dcp_size=2), "decode_context_parallel"),
        (decode_params(remote_block_ids=[[1, 2, 3]]), "fewer_blocks_than_tokens"),
    ],
)
def test_references_that_cannot_be_trimmed_safely_are_named(params: Any, reason: str) -> None:
    assert unusable_reason(params, 16) == reason


@pytest.mark.parametrize("block_size", [0, 8, 24])
def test_block_sizes_that_no_proof_fits_are_refused(block_size: int) -> None:
    assert unusable_reason(decode_params(64, 16), block_size) == "block_size"


def test_a_plain_reference_is_usable() -> None:
    assert unusable_reason(decode_params(70), 16) is None


def test_k10_fields_that_we_do_not_know_go_on_as_they_came() -> None:
    params = decode_params(64, remote_registration_generation=7, something_new={"a": [1]})
    trimmed = trim(params, 32, 16)
    assert trimmed["remote_registration_generation"] == 7
    assert trimmed["something_new"] == {"a": [1]}
