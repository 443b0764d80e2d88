"""Calls a function when the program has imported torch, which nothing here imports itself.

Every Python process of a job imports this module, so it imports almost nothing. Nothing of it is in
the traceback if the import fails, because no loader is replaced: importlib marks the module's spec
at the end of the import, and the spec notices.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


def after_torch_import(callback: Callable[[], None]) -> None:
    """Call `callback` after the first import of torch, or now if torch has been imported."""
    if "torch" in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _TorchFinder(callback))


class _TorchFinder:
    """Finds torch the way Python would, until it is imported.

    Programs also look for torch without importing it. It has the methods of
    importlib.abc.MetaPathFinder, whose import takes 30 ms.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec that the other finders return for torch, watched."""
        if fullname != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if type(spec) is ModuleSpec:
            spec.__class__ = _WatchedSpec
            vars(spec)["finder"] = self
        return spec

    def imported(self) -> None:
        """Remove this finder and call the function; later calls do nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._callback()


class _WatchedSpec(ModuleSpec):
    """A spec that tells its finder when the module has been imported, and then is a usual one.

    `_initializing` is True while the module is executed, and False after it succeeded or failed;
    after a failure sys.modules lacks the module (importlib/_bootstrap.py, _load_unlocked, Python
    3.10 to 3.13).
    """

    @property
    def _initializing(self) -> bool:
        initializing: bool = vars(self)["_initializing"]
        return initializing

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value and self.name in sys.modules:
            finder: _TorchFinder = vars(self).pop("finder")
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            finder.imported()
