"""What the session, the monitor and its parts share in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchmem.allocator.backend import Backend
from torchmem.sdk.engine import EnginePart
from torchmem.sdk.oom.ending import UncaughtErrors
from torchmem.sdk.oom.examination import OomExaminer
from torchmem.sdk.reading.evaluation import Evaluation
from torchmem.sdk.reading.peaks import Phases
from torchmem.sdk.reading.plan import Plan
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.safety.cost import CpuMeter
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.settings import Settings
from torchmem.sdk.steps import StepClock

if TYPE_CHECKING:
    from torchmem.sdk.release.part import ReleasePart


class Context:
    """The shared objects. They exist before CUDA is initialized, and do nothing by themselves.

    A forked child gets its own. `is_exiting` is True while the interpreter exits. `release` is what
    serves the script's requests for memory, once CUDA is initialized.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what is shared
        self,
        settings: Settings,
        backend: Backend,
        environment: Mapping[str, str],
        errors: Errors,
        hooks: PressureHooks,
        uncaught: UncaughtErrors,
    ) -> None:
        self.settings = settings
        self.backend = backend
        self.environment = environment
        self.errors = errors
        self.hooks = hooks
        self.uncaught = uncaught
        self.is_exiting = False
        self.cost = CpuMeter()
        self.clock = StepClock()
        self.plan = Plan()
        self.recorder = Recorder(backend, errors)
        self.components = self.recorder.components
        self.evaluation = Evaluation(backend.modules())
        self.phases = Phases(
            self.recorder, errors, self.cost, settings.interval, reset_peaks=settings.reset_peaks
        )
        self.ooms = OomExaminer(self.recorder, self.phases.is_new)
        self.engine = EnginePart(self.recorder, lambda: self.clock.count, self.phases.reset)
        self.release: ReleasePart | None = None
