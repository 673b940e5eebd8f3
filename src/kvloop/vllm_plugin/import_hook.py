"""Run a function once a module has been imported, without importing it.

vLLM loads general plugins in the API server, the engine core and every worker, before it imports
its HTTP layer. Importing that layer ourselves would cost the other processes seconds.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Action = Callable[[ModuleType], None]


def when_imported(module_name: str, action: Action) -> None:
    """Call ``action(module)`` right after ``module_name`` is imported; now, if it already is."""
    module = sys.modules.get(module_name)
    if module is not None:
        action(module)
        return
    sys.meta_path.insert(0, _Finder(module_name, action))


class _Finder(MetaPathFinder):
    """Finds one module through the other finders, and has its loader followed by the action."""

    def __init__(self, module_name: str, action: Action) -> None:
        self._module_name = module_name
        self._action = action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._module_name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _FollowedLoader(spec.loader, self._action)
        return spec


class _FollowedLoader(Loader):
    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)
