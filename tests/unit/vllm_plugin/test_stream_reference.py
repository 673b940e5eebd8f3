"""The plugin on stand-ins of vLLM's modules: adds its event when asked, and only then."""

import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.vllm_plugin.stream_reference import patch_chat, patch_completions

ASK = {"kvloop_stream_reference": True, "do_remote_prefill": True}
REFERENCE = {"remote_num_tokens": 5}


def results(*, in_tuples: bool) -> AsyncIterator[Any]:
    async def generate() -> AsyncIterator[Any]:
        for ids, params in (([1, 2], None), ([3], REFERENCE)):
            output = SimpleNamespace(token_ids=ids)
            result = SimpleNamespace(outputs=[output], kv_transfer_params=params)
            yield (0, result) if in_tuples else result

    return generate()


def module(*, native: bool = False) -> Any:
    """A fresh stand-in of a serving module; its streams count what they are given."""

    class Serving:
        closed = False

        async def chat_completion_stream_generator(  # type: ignore[no-untyped-def]
            self, request, result_generator, request_id="r"
        ):
            try:
                async for item in result_generator:
                    result = item[1] if isinstance(item, tuple) else item
                    yield f"data: {json.dumps(result.outputs[0].token_ids)}\n\n"
                yield "data: [DONE]\n\n"
            finally:
                Serving.closed = True

        async def completion_stream_generator(  # type: ignore[no-untyped-def]
            self, request, engine_inputs, result_generator
        ):
            async for event in self.chat_completion_stream_generator(request, result_generator):
                yield event

    fields = {"kv_transfer_params": None} if native else {}
    response = SimpleNamespace(model_fields=fields)
    return SimpleNamespace(
        OpenAIServingChat=Serving,
        OpenAIServingCompletion=Serving,
        ChatCompletionStreamResponse=response,
        CompletionStreamResponse=response,
    )


def request(params: Any = None, n: int | None = 1) -> Any:
    return SimpleNamespace(kv_transfer_params=params, n=n)


async def chat_events(serving: Any, asked: Any) -> list[str]:
    stream = serving.chat_completion_stream_generator(
        asked, result_generator=results(in_tuples=False)
    )
    return [event async for event in stream]


OWN = ["data: [1, 2]\n\n", "data: [3]\n\n", "data: [DONE]\n\n"]


async def test_the_event_comes_right_before_done_with_reference_and_ids() -> None:
    vllm = module()
    patch_chat(vllm)
    events = await chat_events(vllm.OpenAIServingChat(), request(ASK))
    added = events.pop(-2)
    assert events == OWN
    assert json.loads(added.removeprefix("data: ")) == {
        "object": "kvloop.stream_reference",
        "kv_transfer_params": REFERENCE,
        "token_ids": [1, 2, 3],
    }


async def test_completions_are_patched_alike() -> None:
    vllm = module()
    patch_completions(vllm)
    serving = vllm.OpenAIServingCompletion()
    stream = serving.completion_stream_generator(request(ASK), [], results(in_tuples=True))
    events = [event async for event in stream]
    assert '"token_ids":[1,2,3]' in events[-2]


@pytest.mark.parametrize(
    "asked",
    [
        request(None),
        request({"do_remote_prefill": True}),
        request({"kvloop_stream_reference": False}),
        request("kvloop_stream_reference"),
        request(ASK, n=2),
    ],
)
async def test_whoever_did_not_ask_gets_vllms_own_stream(asked: Any) -> None:
    vllm = module()
    patch_chat(vllm)
    assert await chat_events(vllm.OpenAIServingChat(), asked) == OWN


async def test_n_that_is_null_is_one() -> None:
    vllm = module()
    patch_chat(vllm)
    assert len(await chat_events(vllm.OpenAIServingChat(), request(ASK, n=None))) == 4


async def test_where_vllm_streams_the_reference_itself_the_event_has_only_the_ids() -> None:
    vllm = module(native=True)
    patch_chat(vllm)
    events = await chat_events(vllm.OpenAIServingChat(), request(ASK))
    assert "kv_transfer_params" not in events[-2]
    assert '"token_ids":[1,2,3]' in events[-2]


async def test_a_client_that_leaves_closes_vllms_own_generator_at_once() -> None:
    vllm = module()
    patch_chat(vllm)
    serving = vllm.OpenAIServingChat()
    stream = serving.chat_completion_stream_generator(request(ASK), results(in_tuples=False))
    await anext(stream)
    await stream.aclose()
    assert vllm.OpenAIServingChat.closed


def test_a_vllm_that_we_do_not_know_is_left_alone_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Serving:
        def chat_completion_stream_generator(self, something_else: Any) -> None: ...

    vllm = SimpleNamespace(
        OpenAIServingChat=Serving,
        ChatCompletionStreamResponse=SimpleNamespace(model_fields={}),
    )
    before = Serving.chat_completion_stream_generator
    with caplog.at_level(logging.ERROR, logger="vllm.kvloop"):
        patch_chat(vllm)
    assert Serving.chat_completion_stream_generator is before
    assert "compatibility table" in caplog.text
