"""What runs inside vLLM.

Loaded by vLLM through the entry point group ``vllm.general_plugins`` in each of its processes, so
importing this package must be cheap and must import neither vLLM nor the router: only
:mod:`kvloop.wire`. What a process does not serve, it does not patch.
"""

from kvloop.vllm_plugin.import_hook import when_imported

CHAT_SERVING = "vllm.entrypoints.openai.chat_completion.serving"
COMPLETION_SERVING = "vllm.entrypoints.openai.completion.serving"
ENGINE_CORE = "vllm.v1.engine.core"


def register() -> None:
    """Prepare the patches; they happen when (and only where) vLLM imports its API servers."""
    when_imported(CHAT_SERVING, _patch_chat)
    when_imported(COMPLETION_SERVING, _patch_completions)
    when_imported(ENGINE_CORE, _patch_engine_core)


def _patch_chat(module: object) -> None:
    from kvloop.vllm_plugin import engine_info, stream_reference

    stream_reference.patch_chat(module)
    engine_info.publish_on_construction(module)


def _patch_completions(module: object) -> None:
    from kvloop.vllm_plugin import stream_reference

    stream_reference.patch_completions(module)


def _patch_engine_core(module: object) -> None:
    from kvloop.vllm_plugin import engine_loop

    engine_loop.patch(module)
