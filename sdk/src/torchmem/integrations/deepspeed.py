"""Training loops with a DeepSpeed engine.

    from torchmem.integrations.deepspeed import batches
    for batch in batches(engine, train_loader):

ZeRO steps its inner optimizer once for each parameter group, so optimizer steps do not show how
many steps the engine has made; `engine.global_steps` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torchmem import sdk

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from typing_extensions import Unpack

T = TypeVar("T")


def batches(
    engine: DeepSpeedEngine,
    loader: Iterable[T],
    phase: str = "train",
    **settings: Unpack[sdk.SettingsKeywords],
) -> Iterator[T]:
    """Yield the batches of a loader, each as one pass of the loop, with the samples of this rank.

    Takes the settings of `sdk.instrument`.
    """
    session = sdk.instrument(**settings)
    for batch in loader:
        samples = sdk.batch_size(batch) if phase == "train" else None
        with _one_pass(session, engine, phase, samples):
            yield batch


def iteration(engine: DeepSpeedEngine, **settings: Unpack[sdk.SettingsKeywords]) -> sdk.Iteration:
    """Mark one `engine.train_batch()` of a pipeline, with the samples of this rank."""
    session = sdk.instrument(**settings)
    samples = None
    with session.errors.suppress("step"):
        samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    return _one_pass(session, engine, "train", samples)


def _one_pass(session: sdk.Session, engine: Any, phase: str, samples: int | None) -> sdk.Iteration:
    before = _steps(session, engine)
    made_step = lambda: _steps(session, engine) > before  # noqa: E731
    return session.iteration(phase, samples, made_step=made_step)


def _steps(session: sdk.Session, engine: Any) -> int:
    """Return the number of steps, without those that loss scaling skips."""
    with session.errors.suppress("step"):
        return int(engine.global_steps - engine.skipped_steps)
    return 0
