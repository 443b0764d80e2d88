"""Calls a function when the program has imported torch, which nothing here imports itself.

Every Python process of a job imports this module, so it imports almost nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def after_torch_import(callback: Callable[[], None]) -> None:
    """Call `callback` after the first import of torch, or now if torch has been imported."""
    if "torch" in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _TorchFinder(callback))


class _TorchFinder:
    """Finds torch once, the way Python would, with a loader that calls `callback`.

    It has the methods of importlib.abc.MetaPathFinder, whose import takes 30 ms.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def find_spec(
        self,
        fullname: str,
        path: object = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec that the other finders return for torch, with another loader."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._callback)  # type: ignore[assignment]
        return spec


class _CallingLoader:
    """Calls `callback` after the module was executed by its own loader."""

    def __init__(self, loader: Any, callback: Callable[[], None]) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its own loader, which it keeps."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback()
