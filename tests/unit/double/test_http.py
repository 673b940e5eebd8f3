"""The double's HTTP surface says what vLLM's says, event for event."""

import json
from typing import Any

from tests.double.engine import Style, pinned_tokens, reference_answer
from tests.double.tokens import IM_END, decode, encode, render_chat
from tests.unit.double.client import CHAT, COMPLETIONS, IDS, MESSAGES, doubles

PROMPT = render_chat(MESSAGES)
WANTED = reference_answer(PROMPT, 20)


async def test_two_turns_over_both_hops_are_answered_right() -> None:
    async with doubles(prefix_caching=False) as s:
        prompt, reference = IDS, None
        for _ in range(3):
            prefilled = await s.prefill({"prompt": prompt}, reference)
            given = prefilled["kv_transfer_params"]
            assert given["remote_prefill_cached_tokens"] in {0, len(prompt) - 2}
            body = {"prompt": prompt, "max_tokens": 20, "return_token_ids": True}
            _, answer = await s.post(s.d_url + COMPLETIONS, {**body, "kv_transfer_params": given})
            output = answer["choices"][0]["token_ids"]
            assert output == reference_answer(prompt, 20)
            prompt, reference = [*prompt, *output, 7], answer["kv_transfer_params"]
            assert reference["do_remote_decode"]
            assert not reference["do_remote_prefill"]


async def test_a_whole_chat_answer_has_vllms_fields() -> None:
    async with doubles() as s:
        given = (await s.prefill({"messages": MESSAGES}))["kv_transfer_params"]
        assert given["remote_blocks_expiry_time"] is None
        assert given["transfer_mode"] == "pull"
        asked = {"messages": MESSAGES, "max_tokens": 20, "return_token_ids": True}
        _, answer = await s.post(s.d_url + CHAT, {**asked, "kv_transfer_params": given})
        choice = answer["choices"][0]
        assert choice["message"]["content"] == decode(WANTED)
        assert (choice["token_ids"], answer["prompt_token_ids"]) == (WANTED, PROMPT)
        assert answer["usage"]["completion_tokens"] == len(WANTED)
        assert answer["kv_transfer_params"]["remote_blocks_expiry_time"] == s.d.now_s + 480
        s.d.drop_reference = True
        _, answer = await s.post(s.d_url + CHAT, {**asked, "kv_transfer_params": given})
        assert answer["kv_transfer_params"] is None
        assert s.d.pinned_blocks


async def test_a_chat_stream_is_one_event_in_each_http_chunk() -> None:
    async with doubles() as s:
        usage = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        chunks = await s.chunks(s.d_url + CHAT, {"messages": MESSAGES, "max_tokens": 20, **usage})
        assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
        assert all(chunk.count(b"\n\n") == 1 for chunk in chunks)
        *events, done = chunks
        assert done == b"data: [DONE]\n\n"
        first, *tokens, last = [json.loads(event[6:]) for event in events]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["prompt_token_ids"] == PROMPT
        assert [token["choices"][0]["token_ids"] for token in tokens] == [[t] for t in WANTED]
        reasons = [token["choices"][0]["finish_reason"] for token in tokens]
        assert reasons == [None] * (len(WANTED) - 1) + ["length"]
        assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], len(PROMPT))


async def test_a_completion_stream_has_its_prompt_ids_in_the_first_choice() -> None:
    async with doubles() as s:
        body = {"prompt": "abc", "max_tokens": 3, "return_token_ids": True, "logprobs": 1}
        events = await s.events(s.d_url + COMPLETIONS, body)
        ids = [event["choices"][0]["prompt_token_ids"] for event in events]
        assert ids == [encode("abc"), None, None]
        assert events[0]["object"] == "text_completion"
        assert events[0]["choices"][0]["logprobs"]["tokens"] == [events[0]["choices"][0]["text"]]


async def test_an_answer_that_ends_by_itself_ends_with_an_empty_piece() -> None:
    async with doubles() as s:
        s.d.style = Style(ends=5)
        body = {"messages": MESSAGES, "max_tokens": 400, "return_token_ids": True}
        *_, last = await s.events(s.d_url + CHAT, body)
        choice = last["choices"][0]
        assert (choice["delta"]["content"], choice["token_ids"]) == ("", [IM_END])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


async def test_streams_carry_no_reference_unless_asked_of_the_plugin_or_of_a_later_engine() -> None:
    async with doubles(prefix_caching=False) as s:

        async def stream(**more: Any) -> list[Any]:
            given = (await s.prefill({"messages": MESSAGES}))["kv_transfer_params"]
            params = {"kv_transfer_params": {**given, **more}}
            return await s.events(
                s.d_url + CHAT, {"messages": MESSAGES, "max_tokens": 20, **params}
            )

        asked = {"kvloop_stream_reference": True}
        assert "kv_transfer_params" not in json.dumps(await stream())
        *_, own = await stream(**asked)
        assert own["object"] == "kvloop.stream_reference"
        assert own["token_ids"] == WANTED
        assert own["kv_transfer_params"]["remote_num_tokens"] == len(PROMPT) + len(WANTED) - 1
        s.d.plugin = False
        assert "kv_transfer_params" not in json.dumps(await stream(**asked))
        s.d.native_stream_reference = True
        *_, last = await stream()
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["kv_transfer_params"]["do_remote_decode"]


async def test_a_stop_string_at_the_very_last_token_leaves_the_reference_as_it_is() -> None:
    async with doubles(prefix_caching=False) as s:
        given = (await s.prefill({"messages": MESSAGES}))["kv_transfer_params"]
        body = {"messages": MESSAGES, "max_tokens": 20, "stop": decode(WANTED[18:])}
        _, answer = await s.post(s.d_url + CHAT, {**body, "kv_transfer_params": given})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv_transfer_params"]["remote_num_tokens"] == len(PROMPT) + 19


async def test_a_stop_string_ends_as_an_abort_in_both_forms() -> None:
    async with doubles(prefix_caching=False) as s:
        stop = decode(WANTED[5:8])
        for stream in (False, True):
            given = (await s.prefill({"messages": MESSAGES}))["kv_transfer_params"]
            given["kvloop_stream_reference"] = True
            body = {"messages": MESSAGES, "max_tokens": 20, "stop": [stop]}
            body["kv_transfer_params"] = given
            if stream:
                *tokens, own = await s.events(s.d_url + CHAT, body)
                said = "".join(event["choices"][0]["delta"]["content"] for event in tokens)
                ended, params = tokens[-1]["choices"][0], own["kv_transfer_params"]
            else:
                _, answer = await s.post(s.d_url + CHAT, body)
                ended, params = answer["choices"][0], answer["kv_transfer_params"]
                said = ended["message"]["content"]
            assert said == decode(WANTED[:5])
            assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
            assert (params, s.d.pinned_blocks) == (None, 0)


async def test_prompt_ids_in_the_transfer_fields_replace_messages_without_media() -> None:
    async with doubles() as s:
        params = {"kv_transfer_params": {"prompt_token_ids": IDS}}
        body = {"messages": MESSAGES, "max_tokens": 20, "return_token_ids": True, **params}
        _, answer = await s.post(s.d_url + CHAT, body)
        assert answer["prompt_token_ids"] == IDS
        assert answer["choices"][0]["token_ids"] == reference_answer(IDS, 20)
        media = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]
        _, answer = await s.post(s.d_url + CHAT, {**body, "messages": media})
        assert answer["prompt_token_ids"] == render_chat(media)
        completion = {"prompt": "abc", "return_token_ids": True, **params}
        _, answer = await s.post(s.d_url + COMPLETIONS, completion)
        assert answer["choices"][0]["prompt_token_ids"] == encode("abc")
        wrong: dict[str, Any] = {"kv_transfer_params": {"prompt_token_ids": []}}
        assert (await s.post(s.d_url + CHAT, {**body, **wrong}))[0] == 400


async def test_several_sequences_and_several_prompts_are_as_many_choices() -> None:
    async with doubles() as s:
        body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 4}
        _, answer = await s.post(s.d_url + COMPLETIONS, body)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts[0] == texts[1] == decode(reference_answer(encode("abc"), 4))
        assert texts[2] == decode(reference_answer(encode("de"), 4))
        events = await s.events(s.d_url + COMPLETIONS, body)
        assert [event["choices"][0]["index"] for event in events[:4]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 5


async def test_parsed_parts_of_a_stream_add_up_to_those_of_a_whole_answer() -> None:
    async with doubles() as s:
        s.d.parses_output, s.d.style = True, Style(thinks=True, calls_tools=True)
        body = {"messages": MESSAGES, "max_tokens": 300, "logprobs": True}
        _, answer = await s.post(s.d_url + CHAT, body)
        events = await s.events(s.d_url + CHAT, body)
        deltas = [event["choices"][0]["delta"] for event in events]
        message = answer["choices"][0]["message"]
        for part in ("reasoning", "content"):
            assert "".join(delta.get(part) or "" for delta in deltas) == message[part]
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert calls == [{"index": 0, **message["tool_calls"][0]}]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_rendering_and_tokenising_give_the_ids_that_would_be_computed() -> None:
    async with doubles() as s:
        _, rendered = await s.post(s.p_url + CHAT + "/render", {"messages": MESSAGES})
        assert rendered["token_ids"] == PROMPT
        _, (rendered,) = await s.post(s.p_url + COMPLETIONS + "/render", {"prompt": "abc"})
        assert rendered["token_ids"] == encode("abc")
        s.p.renders = False
        status, refused = await s.post(s.p_url + CHAT + "/render", {"messages": MESSAGES})
        assert (status, refused["error"]["type"]) == (403, "PermissionDeniedError")
        _, tokens = await s.post(s.p_url + "/tokenize", {"messages": MESSAGES})
        assert (tokens["tokens"], tokens["count"]) == (PROMPT, len(PROMPT))


async def test_metrics_count_under_vllms_names() -> None:
    async with doubles(prefix_caching=False) as s:
        given = (await s.prefill({"prompt": IDS}))["kv_transfer_params"]
        body = {"prompt": IDS, "max_tokens": 5, "kv_transfer_params": given}
        for _ in range(2):
            await s.post(s.d_url + COMPLETIONS, body)

        async def metrics(url: str) -> str:
            async with s.http.get(url + "/metrics") as response:
                return await response.text()

        labels = '{engine="0",model_name="double"}'
        read, held = await metrics(s.d_url), await metrics(s.p_url)
        assert f"vllm:nixl_bytes_transferred_sum{labels} {2 * 160 * 1024.0}" in read
        assert f"vllm:nixl_bytes_transferred_count{labels} 2.0" in read
        assert f"vllm:nixl_num_notifications_after_expiry_total{labels} 1.0" in held
        assert f"vllm:kv_cache_usage_perc{labels} {22 / 2000}" in read
        assert 'block_size="16"' in read
        assert "kvloop:engine_info{" in read
        assert "process_start_time_seconds 1.0" in read


async def test_models_version_and_health() -> None:
    async with doubles() as s:
        s.d.adapters = {"tuned"}
        async with s.http.get(s.d_url + "/v1/models") as response:
            served = {model["id"]: model for model in (await response.json())["data"]}
        assert served["tuned"]["parent"] == "double"
        _, answer = await s.post(
            s.d_url + CHAT,
            {"model": "tuned", "messages": MESSAGES, "max_tokens": 20, "return_token_ids": True},
        )
        wanted = reference_answer(PROMPT, 20, adapter="tuned")
        assert answer["choices"][0]["token_ids"] == wanted
        for path in ("/health", "/version"):
            async with s.http.get(s.d_url + path) as response:
                assert response.status == 200


async def test_every_request_is_remembered_as_it_came() -> None:
    async with doubles() as s:
        body = {"model": "double", "prompt": IDS, "max_tokens": 1, "kv_transfer_params": {"x": 1}}
        await s.post(s.d_url + COMPLETIONS, body)
        await s.post(s.d_url + "/tokenize", {"prompt": "abc"})
        (received,) = s.d.requests
        assert (received.path, received.body) == (COMPLETIONS, body)
        assert received.headers["content-type"] == "application/json"
        assert [call.path for call in s.d.calls] == [COMPLETIONS, "/tokenize"]
        assert pinned_tokens(s.p) == 0
