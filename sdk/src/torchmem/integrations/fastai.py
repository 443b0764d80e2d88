"""fastai's Learner, whose own optimizers the SDK does not see.

from torchmem.integrations.fastai import TorchmemCallback
Learner(..., cbs=[TorchmemCallback()])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastai.callback.core import Callback

from torchmem import sdk
from torchmem.integrations.current_pass import CurrentPass, harmless

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TorchmemCallback(Callback):
    """Publishes steps, samples, and the phases train and evaluate.

    Takes the settings of `sdk.instrument`. A batch counts as a step unless its step is canceled:
    GradientAccumulation does that, and MixedPrecision after an overflow.
    """

    # `Learner.export` and copies of a learner leave them out.
    _stateattrs = ("session", "_pass")

    def __init__(self, **settings: Unpack[sdk.SettingsKeywords]) -> None:
        super().__init__()
        self._use(sdk.instrument(**settings))

    def _init_state(self) -> None:
        """Use the process's session in a callback that was exported or copied."""
        self._use(sdk.instrument())

    def _use(self, session: sdk.Session) -> None:
        self.session = session
        self._pass = CurrentPass(session)
        self._is_canceled = self._has_stepped = False

    @harmless
    def before_batch(self) -> None:
        """Begin a batch."""
        self._is_canceled = self._has_stepped = False
        self._pass.begin("train" if self.training else "evaluate")

    @harmless
    def after_cancel_step(self) -> None:
        """Note that the step is skipped; `after_step` follows."""
        self._is_canceled = True

    @harmless
    def after_step(self) -> None:
        """Note that the optimizer has stepped."""
        self._has_stepped = not self._is_canceled

    @harmless
    def after_batch(self) -> None:
        """End the batch, which may have made a step."""
        samples = sdk.batch_size(self.xb) if self.training else None
        self._pass.end(samples, stepped=self._has_stepped)
