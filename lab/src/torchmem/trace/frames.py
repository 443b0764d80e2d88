"""The program's view of a snapshot's frames: its Python calls, and the path of modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from torchmem.explain.call_stack import NATIVE, CallStack, Frame, package_of
from torchmem.trace.stacks import SnapshotFrame

MAX_MODULES = 4


def call_stack(frames: Iterable[SnapshotFrame]) -> CallStack:
    """Return the Python frames with their packages; C++ frames are left out."""
    named = ((frame, package_of(frame.file, function=frame.function)) for frame in frames)
    return CallStack(
        tuple(
            Frame(frame.file, frame.line or None, frame.function, owner)
            for frame, owner in named
            if owner != NATIVE
        )
    )


def module_path(stack: CallStack) -> str | None:
    """Return the calls of `forward` from the outermost one inwards, as file and line.

    PyTorch records no class names. None if no `forward` called the allocation.
    """
    calls = [
        f"{PurePosixPath(frame.file).name}:{frame.line or '?'}"
        for frame in stack.frames
        if frame.function.rpartition(".")[2] == "forward"
    ]
    inwards = calls[::-1]
    if len(inwards) > MAX_MODULES:
        inwards = [inwards[0], "…", *inwards[1 - MAX_MODULES :]]
    return " > ".join(inwards) or None
