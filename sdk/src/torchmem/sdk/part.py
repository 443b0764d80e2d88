"""The interface of a part: one feature of the SDK, which owns its state.

To add a feature, write a class that derives from `Part` in a new file, and yield an object of it in
`parts.py`. Override only what the feature needs; a part that counts forks would be

    class Forks(Part):
        def at_tick(self) -> None:
            self._forks = read_forks()  # in the background thread, about once a second

        def complete(self, sample: Draft) -> None:
            sample.add(forks=self._forks)  # a field of `Sample`

The monitor calls each method of all parts in the order of that list. An exception ends only that
call, and counts as an error of the part's `stage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from torchmem.sample.sample import Sample
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import Oom
from torchmem.sdk.safety.errors import Stage

StepAction = Literal["read", "watch"]
"""What a part wants at the end of a step: that it is read, or also the next one, as routinely."""


class Part:
    """Does nothing. A part overrides the methods that it needs."""

    stage: Stage = "setup"
    """Errors of this part are counted under this name."""

    def begin(self) -> None:
        """Start, once CUDA is up in this process. It is called again if it was interrupted."""

    @property
    def due_step(self) -> float:
        """The first step, counted from 1, with a call of `at_step`; infinite if there is none.

        The monitor looks at it after ticks, and after each step that did more than to count.
        """
        return math.inf

    def at_step(self) -> StepAction | None:
        """Act at the end of a step that is due, before a read, and return whether it must be read.

        In the training thread.
        """

    def after_read(self, step: int | None) -> None:
        """Act after a read of the statistics, in the thread that read.

        At the end of `step`; None means that no step has ended.
        """

    def at_tick(self) -> bool | None:
        """Act in the background thread, about once in each `interval`, before publication.

        It must not call the allocator. True has the next tick come soon.
        """

    def complete(self, sample: Draft) -> None:
        """Add what this part knows to a sample, in any thread."""

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Use a sample that is published.

        `routine` is True in the background thread, once in each `interval`; False at an OOM, in a
        signal handler, and at the end. A process that is not a rank publishes nothing.
        """

    def at_oom(self, oom: Oom) -> None:
        """Act at an OOM in the thread that ran out of memory, after the sample was published."""

    def end(self, *, may_read: bool) -> None:
        """Stop and give back what is left, after the last sample was published.

        Parts end in the reverse order. The allocator must not be called unless this `may_read`:
        the driver hangs, or the start was interrupted for good.
        """


class Parts:
    """All parts in their order, and for each frequent call those that override its method."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.all = tuple(parts)
        self.acting = self._overriding("due_step")
        self.reading = self._overriding("after_read")
        self.ticking = self._overriding("at_tick")
        self.completing = self._overriding("complete")
        self.publishing = self._overriding("at_publish")

    @property
    def due_step(self) -> float:
        """The first step at whose end a part has something to do."""
        return min((part.due_step for part in self.acting), default=math.inf)

    def due(self, step: int) -> list[Part]:
        """Return the parts that have something to do at the end of this step."""
        return [part for part in self.acting if step >= part.due_step]

    def _overriding(self, method: str) -> tuple[Part, ...]:
        base = getattr(Part, method)
        return tuple(part for part in self.all if getattr(type(part), method) is not base)
