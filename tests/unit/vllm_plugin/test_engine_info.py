"""Engine info: what vLLM's config says, with vLLM's defaults where it says nothing."""

from types import SimpleNamespace

from kvloop.vllm_plugin.engine_info import labels_of


def test_a_bidirectional_engine() -> None:
    transfer = SimpleNamespace(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        engine_id="e",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 60},
    )
    labels = labels_of(SimpleNamespace(kv_transfer_config=transfer))
    assert labels["bidirectional_kv_xfer"] == "true"
    assert labels["decoder_kv_blocks_ttl_s"] == "60"
    assert labels["kv_recompute_threshold"] == "64"


def test_an_engine_without_a_connector() -> None:
    labels = labels_of(SimpleNamespace(kv_transfer_config=None))
    assert (labels["kv_connector"], labels["bidirectional_kv_xfer"]) == ("", "false")
