"""Python call stacks of an allocation, as plain text: no locals, no source lines.

A frame is the user's own unless it belongs to an installed package, to PyTorch, or to Python. The
SDK decides that when it reads the stack, because only there is known what is installed where.
"""

from __future__ import annotations

from dataclasses import dataclass

FRAMEWORK = frozenset({"torch", "python", "torchmem"})
"""Packages whose frames never stand for the user's program."""

MAX_PLACE_BYTES = 100


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
        """The innermost frame of the user's own code.

        Without any, that of a package that is neither PyTorch nor Python, as for installed
        trainers.
        """
        own = (frame for frame in self.frames if frame.package is None)
        foreign = (frame for frame in self.frames if frame.package not in FRAMEWORK)
        return next(own, None) or next(foreign, None)


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


def public_place(frame: Frame) -> tuple[str, str]:
    """Return file and line, and function, as label values: bounded and without directories.

    Directories may contain names of users, and other users read the metrics.
    """
    name = frame.file.rpartition("/")[2]
    place = name if frame.line is None else f"{name}:{frame.line}"
    return place[-MAX_PLACE_BYTES:], frame.function[:MAX_PLACE_BYTES]
