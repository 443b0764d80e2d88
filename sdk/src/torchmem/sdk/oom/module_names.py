"""Which module ran where memory was allocated, by the calls of `forward` in a recorded stack.

PyTorch records file, line and function, but no object. Each `forward` of the stack belongs to the
modules whose class has it at that line. Of these, the answer is the modules inside the modules of
the outer call, under the names that the calling line uses: `encoder.layers.*.linear1`, where the
layers of a loop cannot be told apart. Only code objects and the modules' own dicts are read, so
that no code of the script runs. Holds the modules, so use it and drop it.
"""

from __future__ import annotations

import dis
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torchmem.allocator.backend import Modules
from torchmem.allocator.snapshot import FrameInfo
from torchmem.sample.untrusted import MAX_TEXT

MAX_MODULES = 20_000
MAX_WRAPPERS = 8
MAX_ALTERNATIVES = 3
SECONDS = 0.1
"""What may be spent in all; later questions get no answer."""

# Modules that stand for the one inside, and that no script names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(slots=True, eq=False)
class _Node:
    """One module, and its names from the outermost module inwards."""

    module: Any
    name: str = ""
    parent: _Node | None = None

    def lineage(self) -> Iterator[_Node]:
        """Yield the node, its parent, and so on."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def path(self) -> tuple[str, ...]:
        names = [node.name for node in self.lineage() if node.parent is not None]
        return tuple(name for name in names[::-1] if name not in _WRAPPERS)


class ModuleNames:
    """Finds the modules of stacks, for one report."""

    def __init__(self, modules: Modules, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._deadline = clock() + SECONDS
        self._by_code: dict[CodeType, list[_Node]] = {}
        self._by_file: dict[str, dict[CodeType, tuple[int, int]]] = {}
        self._known: dict[tuple[tuple[CodeType, int], ...], str | None] = {}
        for node in _tree(modules, self._is_over):
            for code in _forward_codes(node.module):
                self._by_code.setdefault(code, []).append(node)
                self._by_file.setdefault(code.co_filename, {})[code] = _span(code)

    def forget_modules(self) -> None:
        """Keep the names only, so that the modules live no longer than without."""
        for nodes in self._by_code.values():
            for node in nodes:
                for each in node.lineage():
                    each.module = None

    def _is_over(self) -> bool:
        return self._clock() > self._deadline

    def of(self, frames: Sequence[FrameInfo]) -> str | None:
        """Return the path of the innermost module whose `forward` runs; None if not known."""
        calls = tuple(
            (code, frame["line"])
            for frame in reversed(frames)
            if frame["name"] == "forward"
            for code in self._codes(frame)
        )
        if not calls:
            return None
        if calls not in self._known:
            self._known[calls] = None if self._is_over() else self._find(calls)
        return self._known[calls]

    def _codes(self, frame: FrameInfo) -> Iterator[CodeType]:
        line = frame["line"]
        for code, (first, last) in self._by_file.get(frame["filename"], {}).items():
            if first <= line <= last:
                yield code

    def _find(self, calls: Sequence[tuple[CodeType, int]]) -> str | None:
        found, names = self._by_code[calls[0][0]], _names_at(*calls[0])
        for code, line in calls[1:]:
            # Without any, it is `super().forward()`, or the module is in no list of the outer one.
            found = _inside(found, names, self._by_code[code]) or found
            names = _names_at(code, line)
            if self._is_over():
                return None
        return _common({node.path for node in found})


def _tree(modules: Modules, is_over: Callable[[], bool]) -> list[_Node]:
    """Return all modules, each with its parent; none if there are too many to tell."""
    nodes: dict[int, _Node] = {}
    seen: set[int] = set()
    left = deque(module for root in modules.roots() if (module := root()) is not None)
    while left:
        if len(nodes) > MAX_MODULES or is_over():
            return []
        module = left.popleft()
        node = nodes.setdefault(id(module), _Node(module))
        members = [] if id(module) in seen else modules.named_submodules(module)
        seen.add(id(module))
        for name, reference in members:
            member = reference()
            if member is not None:
                child = nodes.setdefault(id(member), _Node(member))
                if child.parent is None and child not in node.lineage():
                    child.name, child.parent = name, node
                left.append(member)
    return list(nodes.values())


def _forward_codes(module: object) -> Iterator[CodeType]:
    """Yield the code of a module's `forward`, and of the functions that it wraps."""
    own = object.__getattribute__(module, "__dict__").get("forward")
    function = own if type(own) is FunctionType else _in_class(type(module), "forward")
    for _ in range(MAX_WRAPPERS):
        if type(function) is not FunctionType:
            return
        if function.__code__.co_name == "forward":
            yield function.__code__
        function = function.__dict__.get("__wrapped__")


def _in_class(kind: type, name: str) -> object:
    """Return a member of a class without running a metaclass's code."""
    for base in type.__dict__["__mro__"].__get__(kind):
        members = type.__dict__["__dict__"].__get__(base)
        if name in members:
            return members[name]
    return None


def _span(code: CodeType) -> tuple[int, int]:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_firstlineno, max(lines, default=code.co_firstlineno)


def _inside(outer: Iterable[_Node], names: frozenset[str], found: Iterable[_Node]) -> list[_Node]:
    """Return those of `found` inside `outer`: under one of `names` if there are any, the nearest.

    No other `forward` runs between the two calls, so only lists of modules are in between.
    """
    roots = set(outer)
    inside = [(node, below) for node in found if (below := _path_below(node, roots))]
    named = [(node, below) for node, below in inside if below[-1].name in names] or inside
    nearest = min((len(below) for _, below in named), default=0)
    return [node for node, below in named if len(below) == nearest]


def _path_below(node: _Node, roots: set[_Node]) -> list[_Node]:
    """Return a node and its ancestors below one of `roots`; empty if it is not in any of them."""
    below: list[_Node] = []
    for above in node.lineage():
        if below and above in roots:
            return below
        below.append(above)
    return []


@lru_cache(maxsize=256)
def _names_at(code: CodeType, line: int) -> frozenset[str]:
    """Return the names of attributes that a line of a function uses."""
    current, names = None, set()
    starts = {start: number for start, _, number in code.co_lines()}
    for instruction in dis.get_instructions(code):
        current = starts.get(instruction.offset, current)
        # Python 3.12 has no LOAD_METHOD any longer.
        if current == line and instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
            names.add(str(instruction.argval))
    return frozenset(names)


def _common(paths: set[tuple[str, ...]]) -> str | None:
    """Return one path for several, with `*` in place of names that differ, or all of a few."""
    shortest = min(map(len, paths), default=0)
    columns = [{path[index] for path in paths} for index in range(shortest)]
    names = [_name(column) for column in columns]
    if len({len(path) for path in paths}) > 1:
        names.append("…")
    is_known = any(name not in {"*", "…"} for name in names)
    return ".".join(names)[:MAX_TEXT] if is_known else None


def _name(column: set[str]) -> str:
    is_short = len(column) <= MAX_ALTERNATIVES and not any(map(str.isdigit, column))
    return "|".join(sorted(column)) if len(column) == 1 or is_short else "*"
