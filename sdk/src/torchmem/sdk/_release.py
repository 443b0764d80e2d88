"""The setting `release`: return memory to the driver in tiers, each where it pays.

docs/release.md explains the conditions and shows a measurement.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.sizes import MIB
from torchmem.sample.release_messages import ReleaseRequest
from torchmem.sample.sample import ReleaseTier
from torchmem.sdk._device import DeviceRecord
from torchmem.sdk._ending import in_excepthook
from torchmem.sdk._errors import Errors, log
from torchmem.sdk._gradual_release import AGING_SHARE, MIN_CHANGE, Collected, shares_to_keep
from torchmem.sdk._pressure_hooks import PressureHooks
from torchmem.sdk._recorder import Recorder
from torchmem.sdk._release_account import ReleaseAccount
from torchmem.sdk._settings import ReleaseSettings, Settings

# A release waits for every stream, which does not pay for less memory.
MIN_RELEASABLE_BYTES = 256 * MIB
# The next window is expected to need the highest peak of this many windows.
RECENT_WINDOWS = 3

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
        self._hooks = hooks
        self._windows: dict[int, deque[int]] = {}
        self._taken: dict[int, int] = {}
        self._collected: dict[int, Collected] = {}
        self._shares: dict[int, float] = {}
        self._can_collect = self._tiers.gradual is not None
        self._due = 0.0
        self._retries: dict[int, int] = {}
        self.short_devices: set[int] = set()

    def at_step(self, now: float) -> None:
        """End a window on each device; if one is short of memory, release where that pays."""
        if self._tiers is NO_TIERS:
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
            windows.append(record.end_window())
            collected = self._collected.setdefault(index, Collected()).end_window(record)
            if self._shares.get(index, AGING_SHARE) < AGING_SHARE:
                record.releases["gradual"].add(collected, taken=taken)

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
                record.releases[tier] = ReleaseAccount(is_timed=tier != "gradual")
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
        return self._hooks.exist and bool(self._give_back("hooks", wanted)[0])

    def _release_cache(self, short: Mapping[int, DeviceRecord], share: float) -> bool:
        pays = any(should_release(memory, share) for memory in self._memory(short))
        return pays and bool(self._give_back("cache", 0)[0])

    def _memory(
        self, records: Mapping[int, DeviceRecord], windows: int = RECENT_WINDOWS
    ) -> list[DeviceMemory]:
        """Return the memory of each device by a new snapshot, where the windows are known.

        The sampler's newest snapshot shows the middle of some step.
        """
        segments = self.backend.memory_snapshot() or []
        devices = []
        for index, record in records.items():
            free, total = record.driver_free, record.device.total_bytes
            recent = list(self._windows.get(index, ()))
            peak, allocator = predicted_peak(recent, windows), record.allocator
            if free is None or total is None or peak is None or allocator is None:
                continue
            releasable = measure(segments, index, time.time()).releasable_bytes
            active = allocator.active_bytes.total
            devices.append(DeviceMemory(total, free, active, releasable, peak))
        return devices

    def on_request(self, request: ReleaseRequest) -> tuple[dict[str, int], float]:
        """Return what can be spared, at a step's end; return the bytes by device, and seconds.

        A neighbor gets nothing that the next step is expected to need, by the latest window. Raises
        ReleaseRefusedError.
        """
        if self.backend.is_capturing():
            raise ReleaseRefusedError("a CUDA graph is being captured.")
        self._check(request)
        records = self._recorder.records()
        if request.asker == "neighbors" and not any(
            _can_spare(memory) for memory in self._memory(records, windows=1)
        ):
            raise ReleaseRefusedError("its next step is expected to need its cache.")
        return self._give_back(request.asker, request.hook_bytes)

    def while_idle(self, request: ReleaseRequest) -> tuple[dict[str, int], float]:
        """Empty the cache of a process without steps; return the bytes by device, and seconds.

        For the main thread. Calls no hooks. Raises ReleaseRefusedError.
        """
        self._check(request)
        return self._give_back(request.asker, 0)

    def beside_main_thread(self, request: ReleaseRequest) -> tuple[dict[str, int], float]:
        """Do what `while_idle` does in another thread, while the main thread does nothing.

        Emptying the cache waits for the allocator without the GIL. The statistics, which would wait
        with it, are read only after that.
        """
        self._check(request)
        records = self._recorder.records()
        before = {index: record.reserved_bytes() for index, record in records.items()}
        return self._give_back(request.asker, 0, before)

    def _check(self, request: ReleaseRequest) -> None:
        if request.asker == "neighbors" and not self._tiers.neighbors:
            raise ReleaseRefusedError("its setting release does not name neighbors.")

    def at_oom(self, device: int, requested: int) -> None:
        """Release all that can be spared once the script has caught the OutOfMemoryError.

        For the OOM observer. Does nothing in a thread where the script's main thread could not
        wait for it, or for an OOM of a pressure hook.
        """
        last = self._recorder.records()[device].last_oom
        if self._tiers.neighbors and last is not None and last.cause == "external":
            self.short_devices.add(device)
        if not self._tiers.emergency or self._hooks.is_running:
            return
        is_main = threading.current_thread() is threading.main_thread()
        if is_main or self.backend.backward_node() is not None:
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
        self, tier: ReleaseTier, wanted: int, before: dict[int, int] | None = None
    ) -> tuple[dict[str, int], float]:
        """Call hooks for the wanted bytes, if any, and empty the cache.

        Return what was returned to the driver, in bytes by the device's UUID or index, and the
        seconds it took. In the tier `hooks` the cache stays as it is if the hooks free too little.
        `before` are the reserved bytes, read here if they are not given.
        """
        records, started = self._recorder.records(), time.perf_counter()
        before = self._reserved(records) if before is None else before
        freed = self._hooks.call(wanted, self._allocated) if wanted else 0
        if tier != "hooks" or freed >= MIN_RELEASABLE_BYTES:
            self.backend.empty_cache()
        after, seconds = self._reserved(records), time.perf_counter() - started
        for index, record in records.items():
            account = record.releases.setdefault(tier, ReleaseAccount())
            account.add(before[index] - after[index], seconds)
        names = {index: record.device.uuid or str(index) for index, record in records.items()}
        released = {name: before[index] - after[index] for index, name in names.items()}
        return {name: size for name, size in released.items() if size > 0}, seconds

    def _allocated(self) -> int:
        return sum(current for current, _ in self._recorder.allocated().values())

    def _reserved(self, records: Mapping[int, DeviceRecord]) -> dict[int, int]:
        stats = {index: self.backend.memory_stats(index) or {} for index in records}
        return {
            index: int(values["reserved_bytes"]["all"]["current"]) if values else 0
            for index, values in stats.items()
        }
