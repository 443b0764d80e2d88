"""The script's modules, which PyTorch reports when they register a parameter or a submodule.

Older ones are found among the globals of the main script. Only `_parameters` and `_modules` in a
module's own `__dict__` are read, so that no code of the script runs, such as its `__getattr__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any
from weakref import ref

MAX_MODULES = 1 << 16


class SeenModules:
    """Weak references to the modules that have registered a parameter or a submodule.

    `module_type` is torch.nn.Module; `main` returns the globals of the main script; `most` is how
    many modules are known at once.
    """

    def __init__(
        self,
        module_type: type,
        main: Callable[[], Mapping[str, object]] | None = None,
        most: int = MAX_MODULES,
    ) -> None:
        self.version = 0
        self._type = module_type
        self._main = main or _main_globals
        self._most = most
        self._known: dict[int, ref[Any]] = {}
        self._versions = count(1)
        self._is_full = False

    def see(self, module: Any) -> None:
        """Remember a module, which may be under construction; callable in any thread."""
        known = self._known.get(id(module))
        # A new module may have the id of one that is gone.
        if (known is None or known() is not module) and not self._is_full:
            self._known[id(module)] = ref(module)
            if len(self._known) >= self._most:
                self._forget_dead()
        self.version = next(self._versions)

    def _forget_dead(self) -> None:
        """Forget modules that are gone; give up if most are not, as this would be needed often."""
        known = list(self._known.items())
        self._known = {key: module for key, module in known if module() is not None}
        self._is_full = len(self._known) > self._most // 2

    def roots(self) -> list[ref[Any]]:
        """Return the modules that were seen, and those among the main script's globals."""
        values = list(self._main().values())[: self._most]
        return [] if self._is_full else [*list(self._known.values()), *self._refs(values)]

    def submodules(self, module: object) -> list[ref[Any]]:
        """Return the direct submodules of a module."""
        return self._refs(_own_values(module, "_modules"))

    def named_submodules(self, module: object) -> list[tuple[str, ref[Any]]]:
        """Return the direct submodules of a module with their names."""
        return [
            (name, ref(member))
            for name, member in _own_items(module, "_modules")
            if issubclass(type(member), self._type) and isinstance(name, str)
        ]

    def parameters(self, module: object) -> list[Any]:
        """Return the parameters of a module without those of its submodules."""
        return [value for value in _own_values(module, "_parameters") if value is not None]

    def _refs(self, values: Iterable[object]) -> list[ref[Any]]:
        # `isinstance` would ask the object for its `__class__`, which the script may define.
        return [ref(value) for value in values if issubclass(type(value), self._type)]


def _main_globals() -> Mapping[str, object]:
    main = sys.modules.get("__main__")
    return {} if main is None else main.__dict__


def _own_values(module: object, name: str) -> list[Any]:
    return [value for _, value in _own_items(module, name)]


def _own_items(module: object, name: str) -> list[tuple[Any, Any]]:
    members = object.__getattribute__(module, "__dict__").get(name)
    return list(dict.items(members)) if issubclass(type(members), dict) else []
