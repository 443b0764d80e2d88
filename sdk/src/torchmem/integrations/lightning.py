"""Lightning's Trainer, from the package lightning or pytorch_lightning.

from torchmem.integrations.lightning import TorchmemCallback
Trainer(..., callbacks=[TorchmemCallback()])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmem import sdk
from torchmem.integrations.current_pass import CurrentPass, harmless

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
except ImportError:
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Their name is known without a request; this is their default.
NAMED_LOGGERS = (CSVLogger, TensorBoardLogger, WandbLogger)
UNNAMED = "lightning_logs"


class TorchmemCallback(Callback):
    """Publishes steps, samples, the phases train, evaluate and predict, and the logger's name.

    Takes the settings of `sdk.instrument`. A batch counts as a step if it changes
    `trainer.global_step`: accumulated batches, and several optimizers for one batch, are one step.
    """

    def __init__(self, **settings: Unpack[sdk.SettingsKeywords]) -> None:
        super().__init__()
        self.session = sdk.instrument(**settings)
        self._pass = CurrentPass(self.session)
        self._steps = 0

    @harmless
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Take the name of the run, and end a pass that an earlier run has left open."""
        self._pass.end(samples=0)
        loggers = (each for each in trainer.loggers if isinstance(each, NAMED_LOGGERS))
        name = next((each.name for each in loggers), None)
        if name and name != UNNAMED:
            self.session.rename(name)

    @harmless
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Begin a batch."""
        self._steps = trainer.global_step
        self._pass.begin("train")

    @harmless
    def on_train_batch_end(self, trainer: Any, _: Any, __: Any, batch: Any, *___: Any) -> None:
        """End the batch, which may have made a step."""
        stepped = trainer.global_step != self._steps
        self._pass.end(sdk.batch_size(batch), stepped=stepped)

    @harmless
    def on_validation_batch_start(self, *_: Any) -> None:
        """Begin a batch of the evaluation."""
        self._pass.begin("evaluate")

    @harmless
    def on_validation_batch_end(self, *_: Any) -> None:
        """End the batch."""
        self._pass.end()

    @harmless
    def on_test_batch_start(self, *_: Any) -> None:
        """Begin a batch of the evaluation."""
        self._pass.begin("evaluate")

    @harmless
    def on_test_batch_end(self, *_: Any) -> None:
        """End the batch."""
        self._pass.end()

    @harmless
    def on_predict_batch_start(self, *_: Any) -> None:
        """Begin a batch of the prediction."""
        self._pass.begin("predict")

    @harmless
    def on_predict_batch_end(self, *_: Any) -> None:
        """End the batch."""
        self._pass.end()

    @harmless
    def on_exception(self, *_: Any) -> None:
        """End the batch that failed."""
        self._pass.end(samples=0)
