"""The allocator's cache: what is returned from it to the driver, and what is taken into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torchmem.allocator.backend import HeldBlock
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.release_tiers import ReleaseTier
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.account import timed
from torchmem.sdk.release.device_release import (
    DeviceMemory,
    DeviceRelease,
    DeviceReleases,
)
from torchmem.sdk.release.held_blocks import (
    MIN_SEGMENT_BYTES,
    blocks_to_keep,
    free_blocks,
    segment_sizes,
)
from torchmem.sdk.release.pressure_hooks import PressureHooks

Released = tuple[dict[str, int], float]
"""Bytes that were returned to the driver, by the device's UUID or index, and the seconds."""


class Cache:
    """Releases and fills the cache of all devices of this process.

    `reset_peaks` starts a new window of the peaks.
    """

    def __init__(
        self, devices: DeviceReleases, hooks: PressureHooks, reset_peaks: Callable[[], None]
    ) -> None:
        self.devices = devices
        self.hooks = hooks
        self.recorder: Recorder = devices.recorder
        self.backend = devices.recorder.backend
        self.reset_peaks = reset_peaks

    def snapshot(self) -> Sequence[SegmentInfo]:
        """Return all segments now; the newest snapshot of the recorder shows some earlier step."""
        return self.backend.memory_snapshot() or []

    def release(
        self,
        tier: ReleaseTier,
        wanted: int = 0,
        *,
        kept: Sequence[HeldBlock] = (),
        min_freed: int = 0,
        reserved: Mapping[int, int] | None = None,
    ) -> Released:
        """Call hooks for the wanted bytes, if any, and empty the cache except for `kept`.

        The cache stays as it is if the hooks free less than `min_freed`. `reserved` are the
        reserved bytes before, by device; they are read if they are not given.
        """
        started, devices = time.perf_counter(), self.devices.by_index()
        before = self._reserved(devices) if reserved is None else reserved
        with timed([device.account(tier) for device in devices.values()]):
            freed = self.hooks.call(wanted, self._allocated) if wanted else 0
            if freed >= min_freed:
                self._empty(kept)
        after = self._reserved(devices)
        returned = {index: before[index] - after[index] for index in devices}
        for index, device in devices.items():
            device.account(tier).add(returned[index])
        seconds = time.perf_counter() - started
        self.recorder.read_memory()
        for index, device in devices.items():
            device.end_release(after[index])
        sizes = ((device.name, returned[index]) for index, device in devices.items())
        return {name: size for name, size in sizes if size > 0}, seconds

    def _empty(self, kept: Sequence[HeldBlock] = ()) -> None:
        if kept:
            with self._hold(kept):
                self.backend.empty_cache()
        else:
            self.backend.empty_cache()

    @contextmanager
    def _hold(self, blocks: Sequence[HeldBlock]) -> Iterator[int]:
        """Hold blocks without a trace in the peaks, the recorded step, and the retries.

        Call it after a read of the statistics.
        """
        self.recorder.stop_recording()
        self.reset_peaks()
        with self.backend.hold(blocks) as held:
            for index in {block.device for block in blocks}:
                stats = self.backend.memory_stats(index) or {}
                record = self.recorder.records()[index]
                record.skip_retries(int(stats.get("num_alloc_retries", 0)))
            yield held

    def memory(
        self, devices: Mapping[int, DeviceRelease], segments: Sequence[SegmentInfo], windows: int
    ) -> dict[int, DeviceMemory]:
        """Return the memory of each device by a snapshot, where the windows are known."""
        known = {index: device.memory(segments, windows) for index, device in devices.items()}
        return {index: memory for index, memory in known.items() if memory is not None}

    def needed_blocks(
        self, segments: Sequence[SegmentInfo], devices: Mapping[int, DeviceMemory]
    ) -> list[HeldBlock]:
        """Return the part of the cache that the next step is expected to need."""
        if self._rounds_up:
            return []
        return [
            block
            for index, memory in devices.items()
            for block in blocks_to_keep(segments, index, memory.expected_regrowth)
        ]

    def take(self, device: DeviceRelease, wanted: int) -> bool:
        """Take the missing part of `wanted` bytes from the driver into this process's cache.

        Return False if another process was faster. The next step counts as one that needs them.
        """
        segments = None if self.backend.is_capturing() else self.backend.memory_snapshot()
        if segments is None or self._rounds_up:
            return True
        index = device.record.device.index
        blocks = free_blocks(segments, index, self.backend.current_stream(index))
        usable = [block for block in blocks if block.size >= min(MIN_SEGMENT_BYTES, wanted)]
        missing = wanted - sum(block.size for block in usable)
        if missing > 0:
            has_all = self._take(index, missing, blocks, usable)
            if not has_all:
                return False
        device.promise_bytes(wanted)
        return True

    def _take(
        self,
        index: int,
        missing: int,
        blocks: Sequence[HeldBlock],
        usable: Sequence[HeldBlock],
    ) -> bool:
        """Take segments for `missing` bytes; if the driver has less, return what is not usable."""
        self.recorder.read_stats()
        if missing > self.recorder.obtainable_from_driver(index):
            self._empty(usable)
            blocks = usable
        config = AllocatorConfig.of(self.recorder.settings)
        sizes = segment_sizes(
            min(missing, self.recorder.obtainable_from_driver(index)),
            expandable=config.expandable_segments,
        )
        # Cached blocks must not serve these requests to the driver.
        occupied = [block for block in blocks if block.size >= min(sizes, default=0)]
        taken = [HeldBlock(index, size) for size in sizes]
        with self._hold([*occupied, *taken]) as held:
            has_all = held >= sum(block.size for block in occupied) + sum(sizes)
        self.recorder.read_stats()
        return has_all

    @property
    def _rounds_up(self) -> bool:
        """Whether a request for a whole block would be rounded up, and not served by it."""
        return bool(self.recorder.settings.get("roundup_power2_divisions"))

    def _allocated(self) -> int:
        return sum(current for current, _ in self.recorder.allocated().values())

    def _reserved(self, devices: Mapping[int, DeviceRelease]) -> dict[int, int]:
        stats = {index: self.backend.memory_stats(index) or {} for index in devices}
        return {
            index: int(values["reserved_bytes"]["all"]["current"]) if values else 0
            for index, values in stats.items()
        }
