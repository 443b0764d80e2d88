"""Keeping torch.compile away from our callbacks, which interrupt compiled code at any place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def untraced(torch: Any, function: C) -> C:
    """A function that TorchDynamo leaves alone with all that it calls; does not import torch._dynamo.

    By `torch._C._dynamo.eval_frame` (torch/csrc/dynamo/eval_frame.c): `set_code_exec_strategy`, before it `skip_code`,
    which reaches one frame only, so that there the calls below it run without Dynamo's callback.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)  # noqa: SLF001
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP  # noqa: SLF001
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # noqa: SLF001
        return function
    return _without_callback(frames, function) if hasattr(frames, "skip_code") else function


def _without_callback(frames: Any, function: C) -> C:
    def quiet(*arguments: object) -> object:
        prior = frames.set_eval_frame(None)
        try:
            return function(*arguments)
        finally:
            frames.set_eval_frame(prior)

    frames.skip_code(quiet.__code__)
    return quiet  # type: ignore[return-value]
