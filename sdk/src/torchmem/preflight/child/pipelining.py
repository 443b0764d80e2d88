"""Stages of torch.distributed.pipelining on a lone rank: shapes given by the script need no other rank's consent."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def decide_alone(stages: ModuleType | None) -> None:
    """Let a stage decide by itself that its shapes were given, where it would ask its neighbours.

    stages: `torch.distributed.pipelining.stage`, None when the script has not imported it. By
    `PipelineStage._warmup_forward_vote` and `_warmup_backward_result`, which 2.13 has; older ones do not ask.
    """
    stage = getattr(stages, "PipelineStage", None)
    if stages is None or not hasattr(stage, "_warmup_forward_vote"):
        return
    torch, mode = stages.torch, stages.InferenceMode

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> Any:
        self._own_vote = torch.tensor([0 if mode.needs_dynamic(self._user_meta, has_backward) else 1])
        return self._own_vote if received_acc is None else self._own_vote * received_acc

    def result(self: Any, received_result: Any = None) -> Any:
        return self._own_vote if received_result is None else received_result

    setattr(stage, "_warmup_forward_vote", vote)  # noqa: B010  (mypy: stage is of no known type)
    setattr(stage, "_warmup_backward_result", result)  # noqa: B010
