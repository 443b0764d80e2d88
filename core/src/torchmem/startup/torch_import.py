"""Calls a function when the program has imported torch; nothing here imports torch itself.

Every Python process of a job imports this module, so it imports only what Python itself has loaded.
A program finds and imports torch as it would without it:

- The finder stands before Python's own PathFinder and asks no other, so a finder of the program is
  asked neither earlier nor more often.
- Found by PathFinder, torch is watched by its loader: its execution may come later than its import
  (importlib.util.LazyLoader).
- Found by any other finder, it is watched by its spec, from its first submodule on.
- The finder stays in sys.meta_path, because removing it while another thread goes through that list
  would make that thread skip a finder.
"""

from __future__ import annotations

import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

TORCH = "torch"


def after_torch_import(callback: Callable[[], None]) -> None:
    """Call `callback` after the first import of torch, or now if torch has been imported."""
    if TORCH in sys.modules:
        callback()
        return
    _FINDER.callbacks.append(callback)
    if _FINDER not in sys.meta_path and PathFinder in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _FINDER)


class _TorchFinder:
    """Notices the first import of torch, and finds it only as the next finder would.

    It has the methods of importlib.abc.MetaPathFinder, whose import takes 30 ms.
    """

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.executing = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec that PathFinder returns for torch, if it is the next to be asked."""
        if self.callbacks:
            if fullname == TORCH and self._precedes_path_finder():
                return self._find_torch(path, target)
            if fullname.startswith("torch.") and not self.executing:
                self._watch_running_import()
        return None

    def imported(self) -> None:
        """Call the functions, each once."""
        while self.callbacks:
            self.callbacks.pop(0)()

    def _precedes_path_finder(self) -> bool:
        finders = iter(sys.meta_path)
        return any(finder is self for finder in finders) and next(finders, None) is PathFinder

    def _find_torch(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        try:
            spec = PathFinder.find_spec(TORCH, path, target)
        except Exception:  # noqa: BLE001 - PathFinder is asked next, and raises it itself
            return None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            vars(spec.loader)["exec_module"] = _Execution(spec.loader)
        return spec

    def _watch_running_import(self) -> None:
        torch = sys.modules.get(TORCH)
        spec = vars(torch).get("__spec__") if type(torch) is type(sys) else None
        if type(spec) is ModuleSpec and vars(spec).get("_initializing"):
            spec.__class__ = _WatchedSpec


_FINDER = _TorchFinder()


class _Execution:
    """The `exec_module` of the loader of torch until it is called.

    Loaders can be compared, copied and pickled as without it.
    """

    def __init__(self, loader: SourceFileLoader) -> None:
        self._loader = loader

    def __call__(self, module: ModuleType) -> None:
        vars(self._loader).pop("exec_module", None)
        _FINDER.executing = True
        try:
            self._loader.exec_module(module)
        finally:
            _FINDER.executing = False
        _FINDER.imported()

    # Python leaves the frames of importlib out of tracebacks, so this one is one of them.
    __call__.__code__ = __call__.__code__.replace(
        co_filename=SourceFileLoader.exec_module.__code__.co_filename
    )

    def __eq__(self, other: object) -> bool:
        return type(other) is _Execution

    def __hash__(self) -> int:
        return hash(_Execution)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._loader, "exec_module")


class _WatchedSpec(ModuleSpec):
    """A spec that tells the finder when the module has been imported, and then is a usual one.

    `_initializing` is True while the module is executed, and False after it succeeded or failed;
    after a failure sys.modules lacks the module (importlib/_bootstrap.py, _load_unlocked, Python
    3.10 to 3.14).
    """

    @property
    def _initializing(self) -> bool:
        initializing: bool = vars(self)["_initializing"]
        return initializing

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            if self.name in sys.modules:
                _FINDER.imported()
