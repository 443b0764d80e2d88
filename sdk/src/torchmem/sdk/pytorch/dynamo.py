"""Hide functions from TorchDynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def untraced(torch: Any, function: C) -> C:
    """Return `function` such that TorchDynamo ignores it and all that it calls.

    The SDK's callbacks interrupt compiled code at any place. Does not import torch._dynamo: uses
    `torch._C._dynamo.eval_frame` (torch/csrc/dynamo/eval_frame.c), there
    `set_code_exec_strategy`, and in older versions `skip_code`, which covers one frame only, so
    that the calls below it run without Dynamo's callback.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)  # noqa: SLF001
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP  # noqa: SLF001
        strategy = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001
        frames.set_code_exec_strategy(function.__code__, strategy)
        return function
    return _without_callback(frames, function) if hasattr(frames, "skip_code") else function


def _without_callback(frames: Any, function: C) -> C:
    def wrapper(*arguments: object) -> object:
        prior = frames.set_eval_frame(None)
        try:
            return function(*arguments)
        finally:
            frames.set_eval_frame(prior)

    frames.skip_code(wrapper.__code__)
    return wrapper  # type: ignore[return-value]
