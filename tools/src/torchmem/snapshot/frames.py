"""The program's view of a snapshot's frames: their packages, and the path of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from torchmem.explain.call_stack import CallStack, Frame
from torchmem.recording.stacks import SnapshotFrame

CPP = "C++"
MAX_MODULES = 4

_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/(?P<package>[^/]+?)(?:\.py)?(?:/|$)")
_STANDARD_LIBRARY = re.compile(r"(?:^|/)lib(?:64)?/python3[^/]*/")
_CPP_FILE = re.compile(r"\?\?|.*\.(?:c|cc|cpp|cu|cuh|h|hpp|so)(?:\.\d+)*")


def package(frame: SnapshotFrame) -> str | None:
    """Return the package of a frame by the path of its file; None for the user's own code."""
    installed = _INSTALLED.search(frame.file)
    if installed:
        return installed["package"]
    if _CPP_FILE.fullmatch(frame.file) or "::" in frame.function:
        return CPP
    if frame.file.startswith(("torch/", "<eval_with_key>")):
        return "torch"
    is_standard = _STANDARD_LIBRARY.search(frame.file) or frame.file.startswith("<frozen ")
    return "python" if is_standard else None


def call_stack(frames: Iterable[SnapshotFrame]) -> CallStack:
    """Return the Python frames with their packages; C++ frames are left out."""
    named = ((frame, package(frame)) for frame in frames)
    return CallStack(
        tuple(
            Frame(frame.file, frame.line or None, frame.function, owner)
            for frame, owner in named
            if owner != CPP
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
