"""Training loops with Accelerate.

from torchmem.integrations.accelerate import batches
for batch in batches(accelerator, train_loader):
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torchmem import sdk

if TYPE_CHECKING:
    from accelerate import Accelerator
    from typing_extensions import Unpack

T = TypeVar("T")


def batches(
    accelerator: Accelerator,
    loader: Iterable[T],
    phase: str = "train",
    **settings: Unpack[sdk.SettingsKeywords],
) -> Iterator[T]:
    """Yield the batches of a prepared loader, each as one pass of the loop.

    Takes the settings of `sdk.instrument`. The run is named after the project given to
    `accelerator.init_trackers`. Optimizer steps count, so batches that `accelerator.accumulate`
    joins count as one step.
    """
    session = sdk.instrument(**settings)
    with session.errors.suppress("setup"):
        names = (getattr(tracker, "run_name", None) for tracker in accelerator.trackers)
        name = next(filter(None, names), None)
        if name:
            session.rename(name)
    made_step = _made_step(accelerator) if phase == "train" else None
    for batch in loader:
        samples = sdk.batch_size(batch) if phase == "train" else None
        with session.iteration(phase, samples, made_step=made_step):
            yield batch


def _made_step(accelerator: Any) -> Callable[[], bool] | None:
    """Return a function that detects DeepSpeed's steps; None without DeepSpeed.

    It is needed because ZeRO steps its inner optimizer once for each parameter group.
    """
    if not str(getattr(accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
        return None
    return lambda: accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
