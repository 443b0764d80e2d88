"""What counts as a step of the script's loop: a call, a step of an optimizer, or a pass."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from weakref import ref

from torchmem.sdk.context import Context
from torchmem.sdk.iteration import Iteration
from torchmem.sdk.monitor import Monitor
from torchmem.sdk.safety.cost import MAX_STEP_SECONDS
from torchmem.sdk.safety.interruptions import shield
from torchmem.sdk.steps import Iterations


class Loop:
    """Counts the steps; after a call of `step`, only such calls count.

    `after_step` is for tools that run the script: it is called after a step that the script or a
    framework reports, but not after those of optimizers.
    """

    def __init__(self, context: Context, monitor: Monitor) -> None:
        self.after_step: Callable[[], None] | None = None
        self._is_by_hand = False
        self.follow(context, monitor)

    def follow(self, context: Context, monitor: Monitor) -> None:
        """Report to this monitor; a forked child has its own, and is in no pass of the loop."""
        self._errors, self._cost = context.errors, context.cost
        self._clock, self._components = context.clock, context.components
        self._monitor = monitor
        self._iterations = Iterations()
        # When an optimizer last stepped in an iteration that another one had begun.
        self._joined = 0.0
        # Weak: if training fails, a framework's callback never ends its pass.
        self._open: list[ref[Iteration]] = []

    def step(self, samples: int | None) -> None:
        """Count a step that the script reports."""
        self._is_by_hand = True
        self._count_step(perf_counter(), samples)
        if self.after_step:
            self.after_step()

    @shield
    def begin(self, iteration: Iteration) -> None:
        """Note that a pass of the loop begins."""
        self._open.append(ref(iteration))
        self._clock.note_progress(waits=False)

    @shield
    def end(self, iteration: Iteration, samples: int | None) -> None:
        """Count the samples of a pass that ends, and a step if it made one of its own."""
        self._open = [other for other in self._open if other() not in {iteration, None}]
        has_stepped = False
        with self._errors.suppress("step"):
            self._clock.note_progress(waits=iteration.waits)
            if samples:
                self._clock.add_samples(samples)
            has_stepped = bool(iteration.made_step and iteration.made_step())
        if has_stepped and not iteration.has_counted and not self._is_by_hand:
            self._count_step(perf_counter(), None)
            if self.after_step:
                self.after_step()

    @shield
    def optimizer_stepped(self, optimizer: object) -> None:
        """Count a step if this step of an optimizer shows that one began."""
        now = perf_counter()
        self._monitor.oom_pending = False
        if self._iterations.latest() is not optimizer:
            self._components.see(optimizer)
        if self._is_by_hand:
            return
        begun = self._begun(optimizer)
        if begun == 0:
            self._joined = now
            return
        if begun > 1:
            self._clock.tick(self._joined)
        self._count_step(now, None)

    def _begun(self, optimizer: object) -> int:
        """Return the number of steps to count at this step of an optimizer."""
        passes = [each() for each in reversed(self._open)] if self._open else ()
        iteration = next((each for each in passes if each and each.made_step), None)
        if iteration is None:
            return self._iterations.begun(optimizer)
        begins, iteration.has_counted = not iteration.has_counted, True
        return int(begins)

    @shield
    def _count_step(self, now: float, samples: int | None) -> None:
        """Call the monitor at the end of a step, and count what this cost."""
        try:
            self._monitor.step(now, samples)
        except Exception as error:
            if self._errors.passes("step", error):
                raise
        self._cost.step_seconds += min(MAX_STEP_SECONDS, perf_counter() - now)
