"""The import hook: acts once, when the module comes, and imports nothing itself."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvloop.vllm_plugin.import_hook import when_imported


def test_the_action_runs_right_after_the_import_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[ModuleType] = []
    before = list(sys.meta_path)
    when_imported("late_module", seen.append)
    assert "late_module" not in sys.modules
    module = importlib.import_module("late_module")
    assert seen == [module]
    assert module.value == 1
    assert sys.meta_path == before
    importlib.reload(module)
    assert len(seen) == 1
    del sys.modules["late_module"]


def test_a_module_that_is_there_is_acted_on_at_once() -> None:
    seen: list[ModuleType] = []
    when_imported("json", seen.append)
    assert seen == [sys.modules["json"]]
