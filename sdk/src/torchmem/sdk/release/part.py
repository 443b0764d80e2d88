"""The part that serves the setting `release`: tiers, requests, and neighbors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchmem.sample.sample import Sample
from torchmem.sdk.observation import Oom
from torchmem.sdk.part import Part, Wish
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.neighbors import Neighbors
from torchmem.sdk.release.release import Release
from torchmem.sdk.release.requests import ReleaseRequests
from torchmem.sdk.safety.errors import Errors, Stage
from torchmem.sdk.steps import StepClock


class ReleasePart(Part):
    """`after_release` takes a snapshot in the calling thread, as the main thread may be idle."""

    stage: Stage = "release"

    def __init__(  # noqa: PLR0913, PLR0917 - each is a collaborator
        self,
        release: Release,
        path: Path,
        recorder: Recorder,
        errors: Errors,
        clock: StepClock,
        after_release: Callable[[], None],
        *,
        shares: bool,
    ) -> None:
        """`shares`: other processes may ask for memory at any time."""
        self._release = release
        self._requests = ReleaseRequests(path, release, errors)
        self._neighbors = Neighbors(path, recorder)
        self._recorder = recorder
        self._errors = errors
        self._clock = clock
        self._after_release = after_release
        self._shares = shares

    def wants(self, step: int) -> Wish:  # noqa: ARG002
        """Return "read" while a request waits."""
        return "read" if self._requests.is_busy else None

    def at_step(self) -> None:
        """Release where that pays, and serve a request."""
        self._release.at_step(time.perf_counter())
        if self._requests.is_busy:
            self._requests.at_step()

    @property
    def is_awaited(self) -> bool:
        """Whether a process waits for this one's memory, or may get it at any time."""
        return self._requests.is_busy or (self._shares and self._clock.waits)

    def at_tick(self) -> None:
        """Serve a request if no step does, and ask neighbors if this process is short.

        Without a request, this costs one stat of a file.
        """
        is_late = self._clock.is_late(time.perf_counter())
        if self._requests.tick(is_idle=is_late, waits=self._clock.waits):
            self._after_release()
        with self._errors.suppress("release"):
            while self._release.short_devices:
                device = self._release.short_devices.pop()
                self._neighbors.ask(self._recorder.records()[device])
        self._release.hooks.watch()

    def at_oom(self, oom: Oom) -> None:
        """Release all that can be spared, once the script has caught the OOM."""
        if oom.failed:
            failed, observation = oom.failed, oom.observation
            cause = observation.oom.cause if observation else None
            self._release.at_oom(failed.device, failed.requested, failed.origin, cause)

    def complete(self, sample: Sample) -> Sample:
        """Add the hooks that are no longer called."""
        return replace(sample, hooks_dropped=dict(self._release.hooks.dropped))

    def by_script(self, wanted: int) -> int:
        """Release what pressure hooks can spare, and the cache, in the calling thread."""
        with self._errors.suppress("release"):
            released = self._release.by_script(wanted)
            self._after_release()
            return released
        return 0

    def wait(self, wanted: int, seconds: float, device: int | None, *, take: bool) -> bool:
        """Wait in the calling thread until this process can get `wanted` bytes, or has them."""
        with self._errors.suppress("release"):
            taking = self._release.take if take else None
            return self._neighbors.wait(wanted, seconds, device, self._requests.at_step, taking)
        return False
