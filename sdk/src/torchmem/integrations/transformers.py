"""Hugging Face's Trainer, and the trainers of TRL, which inherit its events.

    from torchmem.integrations.transformers import TorchmemCallback
    Trainer(..., callbacks=[TorchmemCallback()])

The Trainer does not show its batches to callbacks. A batch has `per_device_train_batch_size`
samples, or as many as `auto_find_batch_size` found; only in a single process is the last batch of
an epoch shorter, because Accelerate fills it up where there are several.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin, TrainerCallback

from torchmem import sdk
from torchmem.integrations.current_pass import CurrentPass, harmless

if TYPE_CHECKING:
    from typing_extensions import Unpack

_sessions: list[sdk.Session] = []


class TorchmemCallback(TrainerCallback):
    """Publishes steps, samples, the phases train, evaluate and generate, and `run_name`.

    Takes the settings of `sdk.instrument`. A step is the Trainer's `global_step`.
    """

    def __init__(self, **settings: Unpack[sdk.SettingsKeywords]) -> None:
        self.session = sdk.instrument(**settings)
        self._pass = CurrentPass(self.session)
        self._batches = 0
        _measure_generate(self.session)

    @harmless
    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Take the name of the run unless it is the default, the output directory."""
        if args.run_name and args.run_name != args.output_dir:
            self.session.rename(args.run_name)

    @harmless
    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """End passes that an earlier training left open, and expect a first evaluation."""
        self._pass.end(samples=0)
        if args.eval_on_start:
            self._pass.begin("evaluate")

    @harmless
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin a training step, which may have several batches."""
        self._batches = 0
        self._pass.begin("train")

    @harmless
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Count a batch whose gradients are accumulated."""
        self._batches += 1

    @harmless
    def on_step_end(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Count the step, and expect the evaluation that the Trainer has decided on."""
        batches = self._batches + 1
        self._pass.end(_samples(args, state, train_dataloader, batches), stepped=True)
        if control.should_evaluate:
            self._pass.begin("evaluate")

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Expect the evaluation that the Trainer has decided on."""
        if control.should_evaluate:
            self._pass.begin("evaluate")

    @harmless
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Measure the next batch of the evaluation; without training, not the first one."""
        self._pass.begin("evaluate")

    @harmless
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """End the evaluation."""
        self._pass.end()

    @harmless
    def on_predict(self, *_: Any, **__: Any) -> None:
        """End the prediction."""
        self._pass.end()

    @harmless
    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the open passes."""
        self._pass.end()


def _samples(args: Any, state: Any, loader: Any, batches: int) -> int:
    """Return this process's samples in so many batches, the last of which ends the step."""
    size = int(state.train_batch_size or args.train_batch_size)
    total = batches * size
    is_epoch_end = state.epoch is not None and float(state.epoch).is_integer()
    if is_epoch_end and args.world_size == 1 and not args.dataloader_drop_last:
        dataset: Any = getattr(loader, "dataset", None)
        rest = len(dataset) % size if hasattr(dataset, "__len__") else 0
        total -= size - rest if rest else 0
    return total


def _measure_generate(session: sdk.Session) -> None:
    """Measure `model.generate` as the phase generate of the newest session.

    Trainers such as TRL's generate within a step and tell callbacks nothing about it.
    """
    is_wrapped = bool(_sessions)
    _sessions[:] = [session]
    if is_wrapped:
        return
    generate = GenerationMixin.generate

    @functools.wraps(generate)
    def measured(*arguments: Any, **keywords: Any) -> Any:
        with _sessions[0].phase("generate"):
            return generate(*arguments, **keywords)

    GenerationMixin.generate = measured
