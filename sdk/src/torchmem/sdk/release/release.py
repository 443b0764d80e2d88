"""The setting `release`: return memory to the driver in tiers, each where it pays.

docs/release.md explains the conditions and shows a measurement.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchmem.allocator.backend import HeldBlock
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.explain.call_stack import Origin
from torchmem.sample.release_messages import ReleaseRequest
from torchmem.sample.sample import OomCause, ReleaseTier
from torchmem.sdk.oom.ending import in_excepthook
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.account import ReleaseAccount, timed
from torchmem.sdk.release.gradual import AGING_SHARE, MIN_CHANGE, Collected, shares_to_keep
from torchmem.sdk.release.held_blocks import (
    MIN_SEGMENT_BYTES,
    blocks_to_keep,
    free_blocks,
    segment_sizes,
)
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.safety.errors import Errors, log
from torchmem.sdk.settings import ReleaseSettings, Settings

# A release waits for every stream, which does not pay for less memory.
MIN_RELEASABLE_BYTES = 256 * MIB
# The next window is expected to need the highest peak of this many windows.
RECENT_WINDOWS = 3
# How long an idle process keeps from its neighbors what it has waited for.
PROMISE_SECONDS = 30.0

NO_TIERS = ReleaseSettings()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory at the end of a step, in bytes.

    total: size of the device.
    driver_free: free memory at the driver.
    active: bytes in active blocks.
    releasable: bytes in segments that are wholly free.
    next_peak: active bytes that the next step is expected to reach.
    """

    total: int
    driver_free: int
    active: int
    releasable: int
    next_peak: int


def predicted_peak(windows: Sequence[int], count: int = RECENT_WINDOWS) -> int | None:
    """Return the highest of the latest `count` window peaks, or None if there are too few."""
    return max(windows[-count:]) if len(windows) >= count else None


def expected_regrowth(memory: DeviceMemory) -> int:
    """Return the released bytes that the next step would take from the driver again.

    Stranded bytes are not expected to serve it.
    """
    return min(memory.releasable, max(0, memory.next_peak - memory.active))


def should_release(memory: DeviceMemory, share: float) -> bool:
    """Return whether a release pays.

    It does when the driver has less than `share` of the device free and at least half of the
    releasable bytes would stay released.
    """
    return memory.driver_free < share * memory.total and _can_spare(memory)


def _can_spare(memory: DeviceMemory) -> bool:
    return (
        memory.releasable >= MIN_RELEASABLE_BYTES
        and 2 * expected_regrowth(memory) <= memory.releasable
    )


def missing_bytes(record: DeviceRecord, share: float) -> int:
    """Return the bytes by which the driver's free memory is below `share` of the device."""
    free, total = record.driver_free, record.device.total_bytes
    return 0 if free is None or total is None else max(0, int(share * total) - free)


def _short(
    records: Mapping[int, DeviceRecord], tier: ReleaseTier, share: float
) -> dict[int, DeviceRecord]:
    """Return the devices that are short of memory and on which the tier is on."""
    return {
        index: record
        for index, record in records.items()
        if missing_bytes(record, share)
        and tier in record.releases
        and not record.releases[tier].given_up
    }


@dataclass(slots=True)
class _Promise:
    """Memory that the script has waited for: the active bytes that it expects to reach."""

    peak: int
    until: float
    windows: int = RECENT_WINDOWS


class ReleaseRefusedError(Exception):
    """A request for memory that is not granted; the text is the reason, in one sentence."""


class Release:
    """Releases memory in the training thread, at step ends that have just read statistics.

    `reset_peaks` starts a new window of the peaks. `short_devices` are those whose neighbors have
    to be asked for memory; the background thread asks them.
    """

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        settings: Settings,
        reset_peaks: Callable[[], None],
        hooks: PressureHooks,
    ) -> None:
        self._recorder = recorder
        self.backend = recorder.backend
        self._errors = errors
        self._tiers = settings.release or NO_TIERS
        self._interval = settings.release_interval
        self._reset_peaks = reset_peaks
        self.hooks = hooks
        self._windows: dict[int, deque[int]] = {}
        self._taken: dict[int, int] = {}
        self._collected: dict[int, Collected] = {}
        self._shares: dict[int, float] = {}
        self._can_collect = self._tiers.gradual is not None
        self._due = 0.0
        self._promised: dict[int, _Promise] = {}
        self._after: dict[int, tuple[float | None, int]] = {}
        self._retries: dict[int, int] = {}
        self.short_devices: set[int] = set()

    @property
    def is_calling_hooks(self) -> bool:
        """Whether a hook runs now. What it does in the session releases nothing by itself."""
        return self.hooks.is_running

    def at_step(self, now: float) -> None:
        """End a window on each device; if one is short of memory, release where that pays."""
        if self._tiers is NO_TIERS or self.is_calling_hooks:
            return
        with self._errors.suppress("release"):
            records = self._recorder.records()
            self._end_windows(records)
            self._collect(records)
            if now >= self._due and not self.backend.is_capturing():
                self._release(records, now)

    def _end_windows(self, records: Mapping[int, DeviceRecord]) -> None:
        if self._tiers.cache is not None or self._tiers.neighbors:
            self._reset_peaks()
        for index, record in records.items():
            self._open_accounts(record)
            self._notice_retries(index, record)
            taken = record.taken_bytes - self._taken.get(index, 0)
            self._taken[index] = record.taken_bytes
            for account in record.releases.values():
                account.end_window(taken)
            windows = self._windows.setdefault(index, deque(maxlen=RECENT_WINDOWS))
            windows.append(self._expected_peak(index, record.end_window()))
            collected = self._collected.setdefault(index, Collected()).end_window(record)
            if self._shares.get(index, AGING_SHARE) < AGING_SHARE:
                record.releases["gradual"].add(collected, taken=taken)

    def _expected_peak(self, index: int, peak: int) -> int:
        """Return a window's peak, or what the script has waited for and not used yet."""
        promise = self._promised.get(index)
        if promise is None:
            return peak
        promise.windows -= 1
        if 2 * peak >= promise.peak or promise.windows <= 0:
            del self._promised[index]
        return max(peak, promise.peak)

    def _notice_retries(self, index: int, record: DeviceRecord) -> None:
        retries = record.alloc_retries or 0
        if self._tiers.neighbors and retries > self._retries.setdefault(index, retries):
            self.short_devices.add(index)
        self._retries[index] = retries

    def _open_accounts(self, record: DeviceRecord) -> None:
        on: dict[ReleaseTier, bool] = {
            "gradual": self._tiers.gradual is not None,
            "hooks": self._tiers.hooks is not None,
            "cache": self._tiers.cache is not None,
            "emergency": self._tiers.emergency,
            "neighbors": self._tiers.neighbors,
        }
        for tier, is_on in on.items():
            if is_on and tier not in record.releases:
                record.releases[tier] = ReleaseAccount(tier)
        if self._tiers.neighbors and record.neighbor_requests is None:
            record.neighbor_requests, record.wait_seconds = 0, 0.0

    def _collect(self, records: Mapping[int, DeviceRecord]) -> None:
        """Move the share above which the allocator collects its own oldest segments."""
        if self._tiers.gradual is None or not self._can_collect:
            return
        kept = {index: r for index, r in records.items() if not r.releases["gradual"].given_up}
        shares = shares_to_keep(kept, self._tiers.gradual)
        shares |= dict.fromkeys(self._shares.keys() - shares.keys(), AGING_SHARE)
        moved = (abs(share - self._shares.get(index, 2.0)) for index, share in shares.items())
        if max(moved, default=0.0) > MIN_CHANGE:
            self._can_collect = self.backend.collect_above(shares)
            self._shares = shares if self._can_collect else {}
            if not self._can_collect:
                log(
                    logging.WARNING,
                    "the tier gradual of release is off: it needs the native allocator without "
                    "expandable segments, PyTorch 2.6, and no garbage_collection_threshold of "
                    "your own",
                )

    def _release(self, records: Mapping[int, DeviceRecord], now: float) -> None:
        acts: dict[ReleaseTier, Callable[[Mapping[int, DeviceRecord], float], bool]] = {
            "hooks": self._release_by_hooks,
            "cache": self._release_cache,
        }
        shares = {"hooks": self._tiers.hooks, "cache": self._tiers.cache}
        for tier, act in acts.items():
            short = _short(records, tier, shares[tier] or 0.0)
            if short:
                self._due = now + self._interval
                if act(short, shares[tier] or 0.0):
                    return

    def _release_by_hooks(self, short: Mapping[int, DeviceRecord], share: float) -> bool:
        wanted = sum(missing_bytes(record, share) for record in short.values())
        return self.hooks.exist and bool(self._give_back("hooks", wanted)[0])

    def _release_cache(self, short: Mapping[int, DeviceRecord], share: float) -> bool:
        # The sampler's newest snapshot shows the middle of some step.
        segments = self.backend.memory_snapshot() or []
        devices = self._memory(short, segments, RECENT_WINDOWS)
        if not any(should_release(memory, share) for memory in devices.values()):
            return False
        return bool(self._give_back("cache", kept=self._needed_blocks(segments, devices))[0])

    def _needed_blocks(
        self, segments: Sequence[SegmentInfo], devices: Mapping[int, DeviceMemory]
    ) -> list[HeldBlock]:
        """Return the part of the cache that the next step is expected to need."""
        if self._rounds_up:
            return []
        return [
            block
            for index, memory in devices.items()
            for block in blocks_to_keep(segments, index, expected_regrowth(memory))
        ]

    def _memory(
        self, records: Mapping[int, DeviceRecord], segments: Sequence[SegmentInfo], windows: int
    ) -> dict[int, DeviceMemory]:
        """Return the memory of each device by a snapshot, where the windows are known."""
        devices = {}
        for index, record in records.items():
            free, total = record.driver_free, record.device.total_bytes
            recent = list(self._windows.get(index, ()))
            peak, allocator = predicted_peak(recent, windows), record.allocator
            if free is None or total is None or peak is None or allocator is None:
                continue
            releasable = measure(segments, index, time.time()).releasable_bytes
            active = allocator.active_bytes.total
            devices[index] = DeviceMemory(total, free, active, releasable, peak)
        return devices

    def on_request(self, request: ReleaseRequest) -> tuple[dict[str, int], float]:
        """Return what can be spared, at a step's end; return the bytes by device, and seconds.

        A neighbor gets nothing that the next step is expected to need, by the latest window. Raises
        ReleaseRefusedError.
        """
        self._check(request)
        if request.asker != "neighbors":
            return self._give_back(request.asker, request.hook_bytes)
        segments = self.backend.memory_snapshot() or []
        devices = self._memory(self._recorder.records(), segments, windows=1)
        if not any(map(_can_spare, devices.values())):
            raise ReleaseRefusedError("its next step is expected to need its cache.")
        return self._give_back("neighbors", kept=self._needed_blocks(segments, devices))

    def by_script(self, wanted: int) -> int:
        """Call hooks for the wanted bytes, empty the cache, and return the bytes returned."""
        if self.is_calling_hooks or self.backend.is_capturing():
            return 0
        self._recorder.read_stats()
        return sum(self._give_back("request", wanted)[0].values())

    def while_idle(self, request: ReleaseRequest) -> tuple[dict[str, int], float]:
        """Empty the cache of a process without steps; return the bytes by device, and seconds.

        For the main thread. Calls no hooks. Raises ReleaseRefusedError.
        """
        self._check(request)
        self._check_promises(request)
        return self._give_back(request.asker)

    def beside_main_thread(self, request: ReleaseRequest) -> tuple[dict[str, int], float]:
        """Do what `while_idle` does in another thread, while the main thread does nothing.

        Emptying the cache waits for the allocator without the GIL. The statistics, which would wait
        with it, are read only after that.
        """
        self._check(request)
        self._check_promises(request)
        return self._give_back(request.asker, before=self._reserved_before())

    def _reserved_before(self) -> dict[int, int]:
        """Return the reserved bytes without a read: of the last one, or after a release since."""
        reserved = {}
        for index, record in self._recorder.records().items():
            stamp, after = self._after.get(index, (None, 0))
            is_newer = stamp is not None and stamp == record.stats_timestamp
            reserved[index] = after if is_newer else record.reserved_bytes()
        return reserved

    def _check(self, request: ReleaseRequest) -> None:
        if self.backend.is_capturing():
            raise ReleaseRefusedError("a CUDA graph is being captured.")
        if request.asker == "neighbors" and not self._tiers.neighbors:
            raise ReleaseRefusedError("its setting release does not name neighbors.")

    def _check_promises(self, request: ReleaseRequest) -> None:
        now = time.monotonic()
        if request.asker == "neighbors" and any(now < p.until for p in self._promised.values()):
            raise ReleaseRefusedError("it has waited for this memory and is about to need it.")

    def at_oom(
        self, device: int, requested: int, origin: Origin | None, cause: OomCause | None
    ) -> None:
        """Release all that can be spared once the script has caught the OutOfMemoryError.

        For the OOM observer. Does nothing in a thread for which the script's main thread does not
        wait, or for an OOM of a pressure hook.
        """
        if self._tiers.neighbors and cause == "external":
            self.short_devices.add(device)
        if not self._tiers.emergency or self.is_calling_hooks:
            return
        is_main = threading.get_ident() == threading.main_thread().ident
        if is_main or (origin and origin.main_waits):
            self.backend.call_after_oom(
                self._errors.defer_logging(lambda: self._after_oom(requested))
            )

    def _after_oom(self, requested: int) -> None:
        with self._errors.suppress("release"):
            if not in_excepthook() and not self.backend.is_capturing():
                for record in self._recorder.records().values():
                    self._open_accounts(record)
                self._give_back("emergency", requested)

    def _give_back(
        self,
        tier: ReleaseTier,
        wanted: int = 0,
        before: dict[int, int] | None = None,
        kept: Sequence[HeldBlock] = (),
    ) -> tuple[dict[str, int], float]:
        """Call hooks for the wanted bytes, if any, and empty the cache but for the blocks `kept`.

        Return what was returned to the driver, in bytes by the device's UUID or index, and the
        seconds it took. In the tier `hooks` the cache stays as it is if the hooks free too little.
        `before` are the reserved bytes, read here if they are not given.
        """
        records, started = self._recorder.records(), time.perf_counter()
        before = self._reserved(records) if before is None else before
        accounts = {
            index: record.releases.setdefault(tier, ReleaseAccount(tier))
            for index, record in records.items()
        }
        with timed(accounts.values()):
            freed = self.hooks.call(wanted, self._allocated) if wanted else 0
            if tier != "hooks" or freed >= MIN_RELEASABLE_BYTES:
                self._empty_cache(kept)
        after, released = self._reserved(records), {}
        for index, account in accounts.items():
            account.add(before[index] - after[index])
            released[records[index].device.uuid or str(index)] = before[index] - after[index]
        seconds = time.perf_counter() - started
        self._recorder.read_memory()
        for index in accounts:
            self._after[index] = records[index].stats_timestamp, after[index]
        return {name: size for name, size in released.items() if size > 0}, seconds

    def _empty_cache(self, kept: Sequence[HeldBlock] = ()) -> None:
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
        self._recorder.stop_recording()
        self._reset_peaks()
        with self.backend.hold(blocks) as held:
            for index in {block.device for block in blocks}:
                stats = self.backend.memory_stats(index) or {}
                record = self._recorder.records()[index]
                record.skip_retries(int(stats.get("num_alloc_retries", 0)))
            yield held

    def take(self, index: int, wanted: int) -> bool:
        """Take what this process lacks of `wanted` bytes from the driver into its cache.

        Return False if another process was faster. The next step counts as one that needs them.
        """
        if not self._tiers.neighbors or self.backend.is_capturing():
            return True
        segments = self.backend.memory_snapshot()
        if segments is None:
            return True
        blocks = free_blocks(segments, index, self.backend.current_stream(index))
        usable = [block for block in blocks if block.size >= min(MIN_SEGMENT_BYTES, wanted)]
        missing = wanted - sum(block.size for block in usable)
        if self._rounds_up or (missing > 0 and not self._take(index, missing, blocks, usable)):
            return self._rounds_up
        record = self._recorder.records()[index]
        if record.allocator:
            active, until = record.allocator.active_bytes.total, time.monotonic() + PROMISE_SECONDS
            self._promised[index] = _Promise(active + wanted, until)
        return True

    def _take(
        self,
        index: int,
        missing: int,
        blocks: Sequence[HeldBlock],
        usable: Sequence[HeldBlock],
    ) -> bool:
        """Take segments for `missing` bytes; if the driver has less, return what is not usable."""
        self._recorder.read_stats()
        if missing > self._recorder.obtainable_from_driver(index):
            self._empty_cache(usable)
            blocks = usable
        config = AllocatorConfig.of(self._recorder.settings)
        sizes = segment_sizes(
            min(missing, self._recorder.obtainable_from_driver(index)),
            expandable=config.expandable_segments,
        )
        # Cached blocks must not serve what the driver is asked for.
        occupied = [block for block in blocks if block.size >= min(sizes, default=0)]
        taken = [HeldBlock(index, size) for size in sizes]
        with self._hold([*occupied, *taken]) as held:
            has_all = held >= sum(block.size for block in occupied) + sum(sizes)
        self._recorder.read_stats()
        # Nothing of this was collected by the allocator itself.
        self._collected.setdefault(index, Collected()).end_window(self._recorder.records()[index])
        return has_all

    @property
    def _rounds_up(self) -> bool:
        """Whether a request for a whole block would be rounded up, and not served by it."""
        return bool(self._recorder.settings.get("roundup_power2_divisions"))

    def _allocated(self) -> int:
        return sum(current for current, _ in self._recorder.allocated().values())

    def _reserved(self, records: Mapping[int, DeviceRecord]) -> dict[int, int]:
        stats = {index: self.backend.memory_stats(index) or {} for index in records}
        return {
            index: int(values["reserved_bytes"]["all"]["current"]) if values else 0
            for index, values in stats.items()
        }
