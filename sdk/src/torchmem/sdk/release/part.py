"""The part that serves the setting `release`: its tiers, requests, and neighbors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path

from torchmem.sample.release_messages import MAX_WANTED_BYTES
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import Oom
from torchmem.sdk.part import Part, StepAction
from torchmem.sdk.release.neighbors import Neighbors
from torchmem.sdk.release.release import Release
from torchmem.sdk.release.requests import ReleaseRequests
from torchmem.sdk.release.suspension import Suspension
from torchmem.sdk.safety.errors import Stage, log
from torchmem.sdk.steps import StepClock


class ReleasePart(Part):
    """`after_release` takes a snapshot in the calling thread, as the main thread may be idle."""

    stage: Stage = "release"

    def __init__(
        self,
        release: Release,
        path: Path,
        clock: StepClock,
        after_release: Callable[[], None],
        read_communicators: Callable[[], None],
    ) -> None:
        """`path` is this process's sample file."""
        self._suspension = Suspension(
            release.backend, release.devices, self._make_own_room, read_communicators
        )
        self._release = release
        self._requests = ReleaseRequests(path, release, release.errors)
        take = release.cache.take if release.has("neighbors") else None
        self._neighbors = Neighbors(path, release.devices, take)
        self._clock = clock
        self._after_release = after_release
        self._logged_engines: set[int] = set()

    @property
    def due_step(self) -> float:
        """The next step while a request waits."""
        return 0 if self._requests.is_busy else math.inf

    def at_step(self) -> StepAction:
        """Ask for a read, after which a request is served."""
        return "read"

    def after_read(self, step: int | None) -> None:
        """Release where that pays, and serve a request, at the end of a step."""
        if step is None:
            return
        with self._release.errors.suppress("release"):
            self._release.at_step()
        if self._requests.is_busy:
            self._requests.serve()

    def at_tick(self) -> bool:
        """Serve a request if no step does, and ask neighbors if this process is short of memory.

        Without a request, this costs one stat of a file. The next tick comes soon if a process
        waits for this one's memory, or may get it at any time.
        """
        is_late = self._clock.is_late(time.perf_counter())
        if self._requests.tick(is_idle=is_late, waits=self._clock.waits):
            self._after_release()
        with self._release.errors.suppress("release"):
            self._neighbors.ask_if_short()
        self._release.hooks.watch()
        return self._requests.is_busy or (self._clock.waits and self._release.has("neighbors"))

    def at_oom(self, oom: Oom) -> None:
        """Let each tier act."""
        self._release.at_oom(oom)

    def complete(self, sample: Draft) -> None:
        """Add what the releases did."""
        self._release.complete(sample)

    def by_script(self, wanted: int | None) -> int:
        """Release what pressure hooks can spare, and the cache, in the calling thread.

        By default all pressure hooks are called.
        """
        wanted = MAX_WANTED_BYTES if wanted is None else wanted
        with self._release.errors.suppress("release"):
            released = self._release.by_script(wanted)
            self._after_release()
            return released
        return 0

    def wait(
        self, wanted: int, seconds: float, device: int | None, *, take: bool, borrow: bool = False
    ) -> bool:
        """Wait in the calling thread until this process can get `wanted` bytes, or has them.

        Unless it may `borrow` them, it leaves what sleeping engines take when they wake up. Logs
        which engines hold memory that they could return, once for each process.
        """
        with self._release.errors.suppress("release"):
            is_there = self._neighbors.wait(
                wanted,
                seconds,
                device,
                self._requests.serve,
                take=take,
                left=lambda: 0 if borrow else self._asleep_bytes(device),
            )
            if not is_there:
                self._log_awake_engines(device)
            return is_there
        return False

    def _log_awake_engines(self, device: int | None) -> None:
        for pid, note in self._neighbors.awake_caches(device).items():
            if pid not in self._logged_engines:
                self._logged_engines.add(pid)
                text = "wait_for_memory timed out. Process %d uses the same GPU, and %s"
                log(logging.WARNING, text, pid, note)

    def _asleep_bytes(self, device: int | None) -> int:
        return self._release.asleep_bytes + self._neighbors.asleep_bytes(device)

    def suspend_communicators(self, names: Collection[str] | None) -> int:
        """Suspend, in the calling thread; return the bytes. Raise RuntimeError if NCCL fails."""
        return self._suspension.suspend(names)

    def resume_communicators(self, names: Collection[str] | None) -> int:
        """Resume, likewise."""
        return self._suspension.resume(names)

    def _make_own_room(self, wanted: int, device: int) -> None:
        free = self._release.backend.free_bytes(device)
        if free is not None and free < wanted:
            self.by_script(wanted - free)

    def make_room(self, wanted: int, seconds: float, device: int) -> None:
        """Make room at the driver before the engine of this process wakes up.

        First the hooks and the cache of this process, then, with the tier `neighbors`, those of
        other processes.
        """
        with self._release.errors.suppress("release"):
            free = self._release.backend.free_bytes(device)
            if free is None or free >= wanted:
                return
            self.by_script(wanted - free)
            if self._release.has("neighbors"):
                serve = self._requests.serve
                self._neighbors.wait(wanted, seconds, device, serve, for_engine=True)
