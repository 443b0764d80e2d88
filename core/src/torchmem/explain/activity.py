"""What the program does other than training steps, judged by the functions in a call stack."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from torchmem.explain.call_stack import FRAMEWORK, CallStack, Frame, Origin

_NAMES = re.compile(
    r"_*(?:eval|evaluat|validat|predict|generat|infer|rollout|save|checkpoint|export)\w*"
    r"|_*(?:val|test|val_\w+|test_\w+|\w+_eval|\w+_evaluation|\w+_validation)"
)
"""Common names of functions that do something other than a training step."""
_COPIES = re.compile(r"_*(?:save|checkpoint|export|deepcopy)\w*")
_COPY = "deepcopy"
"""Python's `copy.deepcopy`, which makes copies of models that stay."""
_FOREACH = re.compile(r"/torch/optim/\w+\.py:(?:\w+\.)?_multi_tensor_\w+$")
_LOADERS = ("/torch/serialization.py", "/safetensors/torch.py")


def activity(origin: Origin | None, usual: Container[str] = ()) -> str | None:
    """Return the innermost phase of the script, or else the function that is not a training step.

    `usual` are the functions in which steps end, such as `test_training`.
    """
    if origin is None:
        return None
    if origin.phase is not None:
        return origin.phase
    stacks = (origin.stack, origin.main_stack or CallStack())
    names = (name for stack in stacks for name in activities(stack))
    return next((name for name in names if name not in usual), None)


def activities(stack: CallStack) -> list[str]:
    """Return the calls whose names are not those of training steps, the outermost first."""
    return [f"{frame.function}()" for frame in reversed(stack.frames) if _is_activity(frame)]


def trains(origin: Origin | None) -> bool:
    """Return whether a backward pass or an optimizer's step made the request."""
    return origin is not None and (origin.backward is not None or is_in_optimizer(origin))


def is_copy(activity: str) -> bool:
    """Return whether a phase or function, by its name, saves or copies a model."""
    return _COPIES.fullmatch(activity.removesuffix("()")) is not None


def is_in_optimizer(origin: Origin | None) -> bool:
    """Return whether an optimizer's step made the request."""
    return any(map(_is_optimizer_step, _frames(origin)))


def updates_at_once(origin: Origin | None) -> bool:
    """Return whether an optimizer's step over all parameters at once (foreach) made the request."""
    return any(_FOREACH.search(f"{frame.file}:{frame.function}") for frame in _frames(origin))


def is_loading(origin: Origin | None) -> bool:
    """Return whether a checkpoint that is read into GPU memory made the request."""
    return any(loads(frame.file) for frame in _frames(origin))


def loads(file: str) -> bool:
    """Return whether a function in this file reads the tensors of a checkpoint."""
    return file.endswith(_LOADERS)


def _frames(origin: Origin | None) -> Sequence[Frame]:
    return origin.stack.frames if origin else ()


def _is_optimizer_step(frame: Frame) -> bool:
    return "/torch/optim/" in frame.file and frame.function.rpartition(".")[2] == "step"


def _is_activity(frame: Frame) -> bool:
    name = frame.function.rpartition(".")[2]
    if frame.package in FRAMEWORK:
        return frame.package == "python" and name == _COPY
    return _NAMES.fullmatch(name) is not None
