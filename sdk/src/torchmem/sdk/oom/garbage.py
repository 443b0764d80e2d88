"""Measures on the device what Python's collector frees, from an OOM to the end of the process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

from torchmem.allocator.backend import Backend
from torchmem.explain.call_stack import Frame
from torchmem.explain.garbage import Garbage
from torchmem.explain.lines import MIN_EXPLAINED, Uses, grown, uses_by_line
from torchmem.sample.native_threads import is_main_thread
from torchmem.sdk.oom.garbage_types import can_collect, collect
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.unraisable import IgnoredInterruptions

WATCHED_SECONDS = 30.0
"""How long collections are measured after an OOM: an exception that ends the process is faster."""
SPARE_OBJECTS = 1000
MIN_BYTES = 1 << 20
"""Less garbage is not worth a word."""


class GarbageMeter:
    """Measures what collections free on the device of the newest OOM.

    An exception may create enough objects on its way up that the collector runs by itself. What
    that frees was garbage at the OOM, too, but its types are lost. The collector is due once so
    many more objects were created than deleted, so `watch` deletes some that were kept for that.
    """

    def __init__(
        self, backend: Backend, errors: Errors, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._errors = errors
        self._clock = clock
        self._device = 0
        self._freed = 0
        self._before: int | None = None
        self._deadline = 0.0
        self._callback = backend.untraced(self._make_callback())
        self._ignored = IgnoredInterruptions(self._callback.__code__, backend.raise_after)
        self._spare = _spare_objects()

    def watch(self, device: int) -> None:
        """Measure from now on what each collection in the main thread frees on a device."""
        self._device, self._freed, self._before = device, 0, None
        self._deadline = self._clock() + WATCHED_SECONDS
        self._spare.clear()
        if self._callback not in gc.callbacks:
            self._ignored.install()
            gc.callbacks.append(self._callback)

    def expire(self, *, is_dying: bool) -> None:
        """Stop to measure if the process has survived the OOM, or does not end of it soon."""
        if self._callback in gc.callbacks and (not is_dying or self._clock() > self._deadline):
            self.stop()
            self._spare = _spare_objects()

    def stop(self) -> None:
        """Measure collections no longer."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)
            self._ignored.remove()

    def _make_callback(self) -> Callable[[str, object], None]:
        def on_collection(phase: str, _: object) -> None:
            # Another thread might wait for the allocator with the GIL.
            if is_main_thread() and self._backend.is_initialized():
                with self._errors.suppress("report"):
                    self._measure(is_start=phase == "start")

        return on_collection

    def _measure(self, *, is_start: bool) -> None:
        if is_start:
            self._before = self._allocated()
        elif self._before is not None:
            self._freed += max(0, self._before - self._allocated())
            self._before = None

    def _allocated(self) -> int:
        stats = self._backend.memory_stats(self._device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def measured(self, *, with_line: bool) -> Garbage | None:
        """Run a full collection; return what it and those since the OOM freed, None if nothing.

        `with_line`: whether stacks are recorded. Runs finalizers of the script.
        """
        self.stop()
        uses = self._uses() if with_line else {}
        before = self._allocated()
        storage_of = partial(self._backend.storage, device=self._device)
        types = collect(storage_of) if can_collect() else ()
        freed = self._freed + max(0, before - self._allocated())
        if freed < MIN_BYTES:
            return None
        line = _freed_line(uses, self._uses(), freed) if with_line else None
        return Garbage(freed, types, line, is_collector_off=not gc.isenabled())

    def _uses(self) -> Uses:
        return uses_by_line(self._backend.memory_snapshot() or (), self._device)


def _spare_objects() -> list[list[object]]:
    """Return more objects that the collector counts than the report of an OOM leaves."""
    return [[] for _ in range(SPARE_OBJECTS)]


def _freed_line(before: Uses, after: Uses, freed: int) -> Frame | None:
    """Return the line whose bytes shrank by most of what was freed; None if none did."""
    shrunk = grown(after, before)
    return shrunk[0].frame if shrunk and shrunk[0].bytes >= MIN_EXPLAINED * freed else None
