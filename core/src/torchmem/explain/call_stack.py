"""The Python call stack of an allocation as plain text, and the one rule for the user's line.

A frame belongs to the user's code unless it is in an installed package, PyTorch, or Python. The
user's line is the innermost frame of that code. Without one, it is the innermost frame of an
installed package, as of a trainer, and without that the innermost frame of all. OOM reports,
recorded history, snapshots and preflights all name the line by this rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

NATIVE = "C++"
FRAMEWORK = frozenset({"torch", "python", "torchmem", NATIVE})
"""Packages whose frames never stand for the user's program."""

MAX_PLACE_BYTES = 100
SIMULATED_SCRIPTS = "torchmem.simulator.scenarios."
"""The modules that stand for the user's scripts in `torchmem demo`."""

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
# Python's own modules, PyTorch's in a build from source, and generated code.
_PYTHON = re.compile(r"<frozen |.*/lib(?:64)?/python3[\d.]*/")
_TORCH = re.compile(
    r"<eval_with_key>|.*/torchinductor_[^/]*/"
    r"|(?:.*/)?torch/(?:nn|optim|autograd|cuda|utils|distributed|_[a-z]\w*)/"
)
_NATIVE_FILE = re.compile(r"\?\?|.*\.(?:c|cc|cpp|cu|cuh|h|hpp|so)(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: its file, its line if known, its function, and the package that it belongs to.

    `package` is None for the user's own code.
    """

    file: str
    line: int | None
    function: str
    package: str | None = None

    @property
    def place(self) -> str:
        """The file and the line, as editors read them."""
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class CallStack:
    """Frames from the innermost outwards; `omitted` were left out before the outermost ones."""

    frames: tuple[Frame, ...] = ()
    omitted: int = 0

    @property
    def own(self) -> Frame | None:
        """The innermost frame of the user's own code, see `own_index`."""
        index = own_index(frame.package for frame in self.frames)
        return None if index is None else self.frames[index]

    @property
    def line(self) -> Frame | None:
        """The user's line, see `line_index`; None without frames."""
        if not self.frames:
            return None
        return self.frames[line_index(frame.package for frame in self.frames)]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an allocation came from.

    Attributes:
        stack: of the thread that asked; empty for threads without Python code.
        main_stack: of the main thread, if another thread asked.
        thread: name of the thread that asked, if it is another one and Python knows it.
        backward: name of the autograd node whose backward asked, such as MmBackward0.
        phase: the innermost `session.phase` that was open.
    """

    stack: CallStack = CallStack()
    main_stack: CallStack | None = None
    thread: str | None = None
    backward: str | None = None
    phase: str | None = None

    @property
    def own(self) -> Frame | None:
        """The line of the user's program that asked, or that the main thread was at meanwhile."""
        return self.stack.own or (self.main_stack.own if self.main_stack else None)

    @property
    def main_waits(self) -> bool:
        """Whether the main thread waits in `backward()` for the thread of autograd that asked."""
        frames = self.main_stack.frames if self.main_stack and self.backward is not None else ()
        return bool(frames) and "/torch/autograd/" in frames[0].file


def own_index(packages: Iterable[str | None]) -> int | None:
    """Return the index of the user's own innermost frame, given the packages of all frames.

    Without any, that of a package that is neither PyTorch nor Python, as for installed trainers.
    """
    foreign = None
    for index, package in enumerate(packages):
        if package is None:
            return index
        if foreign is None and package not in FRAMEWORK:
            foreign = index
    return foreign


def line_index(packages: Iterable[str | None]) -> int:
    """Return the index of the user's line, given the packages of all frames, which are some."""
    return own_index(packages) or 0


@lru_cache(maxsize=4096)
def package_of(file: str, module: str = "", function: str = "") -> str | None:
    """Return the installed package that a function belongs to; None for the user's own code.

    `file` is the file of its code, and `module` and `function` are its names if known. A function
    of a shared library belongs to `NATIVE`: PyTorch records these with `stacks="all"`.
    """
    if module.startswith(SIMULATED_SCRIPTS):
        return None
    top = module.partition(".")[0]
    if top in {"torch", "torchmem"}:
        return top
    installed = _INSTALLED.match(file)
    if installed:
        return installed[1].removesuffix(".py")
    if "::" in function or _NATIVE_FILE.fullmatch(file):
        return NATIVE
    if _TORCH.match(file):
        return "torch"
    return "python" if _PYTHON.match(file) else None


def public_place(frame: Frame) -> tuple[str, str]:
    """Return file and line, and function, as label values: bounded and without directories.

    Directories may contain names of users, and other users read the metrics.
    """
    name = frame.file.rpartition("/")[2]
    place = name if frame.line is None else f"{name}:{frame.line}"
    return place[-MAX_PLACE_BYTES:], frame.function[:MAX_PLACE_BYTES]
