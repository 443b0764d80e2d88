"""The interface of a part: one feature of the SDK, which owns its state.

The monitor calls the methods of every part in the order of the list in `parts.py`. An exception
ends only that call, and counts as an error of the part's `stage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from torchmem.sample.sample import Sample
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import MeasuredSnapshot, Oom
from torchmem.sdk.safety.errors import Stage

StepAction = Literal["call", "read", "watch"]
"""What a part does at the end of a step: a call of its `at_step`, or also a read before it.

With "watch" the next step is read too, as after a routine read.
"""


class Part:
    """Does nothing. A part overrides the methods that it needs."""

    stage: Stage = "setup"
    """Errors of this part are counted under this name."""

    def begin(self) -> None:
        """Start, once CUDA is up in this process. It is called again if it was interrupted."""

    step_action: StepAction = "call"
    """What the part does from its `due_step` on."""

    @property
    def due_step(self) -> float:
        """The first step, counted from 1, with `step_action` at its end; infinite if there is none.

        The monitor looks at it after ticks, and after each step that did more than to count.
        """
        return math.inf

    def at_read(self, step: int | None) -> None:
        """Act after a read of the statistics, in the thread that read.

        At the end of `step`; None means that no step has ended.
        """

    def at_early_read(self, step: int) -> None:
        """Act after a read of only the allocated bytes, at the end of one of the first steps."""

    def at_step(self) -> None:
        """Act at the end of a step that was read, or that it wants; in the training thread."""

    def at_tick(self) -> None:
        """Act in the background thread, about once in each `interval`, before publication.

        It must not call the allocator.
        """

    @property
    def is_awaited(self) -> bool:
        """Whether the next tick must come soon."""
        return False

    def at_snapshot(self, snapshot: MeasuredSnapshot) -> None:
        """Use a snapshot that was just measured, in the background thread."""

    def complete(self, sample: Draft) -> None:
        """Add what this part knows to a sample, in any thread."""

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Use a sample that is published.

        `routine` is True in the background thread, once in each `interval`; False at an OOM, in a
        signal handler, and at the end. A process that is not a rank publishes nothing.
        """

    def at_oom(self, oom: Oom) -> None:
        """Act at an OOM in the thread that ran out of memory, after the sample was published."""

    def end(self) -> None:
        """Stop, after the last read and before the last sample is published.

        Parts end in the reverse order.
        """

    def close(self) -> None:
        """Give back what is left, after the last sample was published.

        It is called without `end` if the start was interrupted for good.
        """

    def close_in_child(self) -> None:
        """Close what a forked child has inherited and must not keep, such as a port."""


class Parts:
    """All parts in their order, and for each frequent call those that override its method."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.all = tuple(parts)
        self.acting = self._overriding("due_step")
        self.reading = self._overriding("at_read")
        self.reading_early = self._overriding("at_early_read")
        self.stepping = self._overriding("at_step")
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
