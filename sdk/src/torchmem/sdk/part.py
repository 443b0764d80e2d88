"""The interface of a part: one feature of the SDK, which owns its state.

The monitor calls the methods of every part in the order of the list in `parts.py`. An exception
ends only that call, and counts as an error of the part's `stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torchmem.sample.sample import DeviceSample, Sample
from torchmem.sdk.observation import MeasuredSnapshot, Oom
from torchmem.sdk.safety.errors import Stage

Wish = Literal["call", "read"] | None
"""What a part wants at the end of a step: a call of its `at_step`, or a read before it."""


class Part:
    """Does nothing. A part overrides the methods that it needs."""

    stage: Stage = "setup"
    """Errors of this part are counted under this name."""

    def begin(self) -> None:
        """Start, once CUDA is up in this process. It is called again if it was interrupted."""

    def wants(self, step: int) -> Wish:
        """Return what the part wants at the end of `step`, counted from 1.

        It is called at each step, in the training thread, and must take less than a microsecond.
        """

    def at_read(self, step: int | None) -> None:
        """Act after a read of the statistics, in the thread that read.

        At the end of `step`, or with None while no step comes. In the first steps only the
        allocated bytes may have been read.
        """

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

    def complete(self, sample: Sample) -> Sample:
        """Return the sample with what this part adds to it; in any thread."""
        return sample

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Use a sample that is published.

        `routine` is False at an OOM, in a signal handler, and at the end.
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


def with_devices(sample: Sample, change: Callable[[DeviceSample], DeviceSample]) -> Sample:
    """Return the sample with each device changed, for `Part.complete`."""
    return replace(sample, devices=tuple(map(change, sample.devices)))
