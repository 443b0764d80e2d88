"""Processes of one user that share a GPU, and how one asks the others for memory.

All of them have the tier `neighbors` of the setting `release`, which their samples show. The
process that asks writes a request next to such a sample. Until then nothing is read or written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchmem.explain.serving import awake_cache
from torchmem.host.process_table import ProcessTable
from torchmem.sample.process_messages import encode, sibling_path
from torchmem.sample.release_messages import REQUEST_SUFFIX, ReleaseRequest
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX, replace_file
from torchmem.sample.sample import Process
from torchmem.sample.untrusted import UntrustedFileError, convert, read_untrusted, sanitize_json
from torchmem.sdk.publish.request_files import is_fresh
from torchmem.sdk.release.device_release import DeviceRelease, DeviceReleases
from torchmem.sdk.safety.interruptions import ignore

MAX_NEIGHBORS = 64
POLL_SECONDS = 0.02
# A neighbor that refused is asked again after this time.
ASK_SECONDS = 1.0

Take = Callable[[DeviceRelease, int], bool]
"""Takes bytes on a device; returns False if another process was faster."""


class Neighbors:
    """The other processes of this user in the run directory, next to this process's `sample`.

    `take` takes memory that was waited for into this process's cache.
    """

    def __init__(
        self,
        sample: Path,
        devices: DeviceReleases,
        take: Take | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sample = sample
        self._devices = devices
        self._recorder = devices.recorder
        self._take = take
        self._clock = clock
        self._sleep = sleep

    def wait(  # noqa: PLR0913 - the last ones are options
        self,
        wanted: int,
        seconds: float,
        device: int | None,
        serve: Callable[[], None],
        *,
        take: bool = False,
        left: Callable[[], int] = lambda: 0,
        for_engine: bool = False,
    ) -> bool:
        """Wait until this process can get `wanted` bytes; return whether it can.

        It asks the neighbors, again if they refuse, and calls `serve` meanwhile, so that two
        processes that wait for each other both return memory. `device` is torch's index; by default
        the device on which this process has most memory. With `take` the memory is taken into the
        cache; if another process is faster, the wait goes on. What `left` returns stays free beside
        them. `for_engine`: an engine wakes up, which takes from the driver alone, so the neighbors'
        hooks are asked for what the driver lacks. Returns False at once if nothing is known about
        the device.
        """
        self._recorder.read_stats()
        found = self._device(device)
        if found is None:
            return False
        started = now = self._clock()
        asked, waited = -ASK_SECONDS, found.wait_seconds or 0.0
        needed = wanted + left()
        obtainable = self._free if for_engine else self._obtainable
        while not (
            is_there := obtainable(found) >= needed and self._has_taken(found, wanted, take)
        ) and (now < started + seconds):
            if now >= asked + ASK_SECONDS:
                asked, needed = now, wanted + left()
                with ignore(OSError):  # the memory may come without a request
                    self.ask(found, needed - obtainable(found) if for_engine else 0)
            serve()
            self._sleep(POLL_SECONDS)
            now = self._clock()
            found.wait_seconds = waited + now - started
        return is_there

    def _has_taken(self, device: DeviceRelease, wanted: int, take: bool) -> bool:
        return not take or self._take is None or self._take(device, wanted)

    def _device(self, index: int | None) -> DeviceRelease | None:
        devices = self._devices.by_index()
        if index is not None:
            return devices.get(index)
        return max(devices.values(), key=lambda each: each.record.reserved_bytes(), default=None)

    def _free(self, device: DeviceRelease) -> int:
        """Return what the driver has free, in bytes."""
        return self._recorder.backend.free_bytes(device.record.device.index) or 0

    def _obtainable(self, device: DeviceRelease) -> int:
        """Return what the driver has free for this process, and what it has cached, in bytes."""
        index = device.record.device.index
        stats = self._recorder.backend.memory_stats(index)
        cached = 0
        if stats:
            reserved, active = (stats[name]["all"] for name in ("reserved_bytes", "active_bytes"))
            cached = reserved["current"] - active["current"]
        return int(cached) + self._recorder.obtainable_from_driver(index)

    def ask_if_short(self) -> None:
        """Ask for memory on the devices where this process is short of it."""
        for device in self._devices.all():
            if device.is_short:
                device.is_short = False
                self.ask(device)

    def asleep_bytes(self, device: int | None) -> int:
        """Return what sleeping engines of other processes take on a device when they wake up."""
        found = self._device(device)
        uuid = found.record.device.uuid if found else None
        with ignore(OSError):
            samples = (sample for _, sample in live_neighbors(self._sample))
            return sum(_asleep_bytes(sample, uuid) for sample in samples)
        return 0

    def awake_caches(self, device: int | None) -> dict[int, str]:
        """Return what engines of other processes hold on a device, a sentence for each pid."""
        found = self._device(device)
        uuid = found.record.device.uuid if found else None
        with ignore(OSError):
            samples = [sample for _, sample in live_neighbors(self._sample)]
            notes = {each["process"]["pid"]: _awake_cache(each, uuid) for each in samples}
            return {pid: note for pid, note in notes.items() if note}
        return {}

    def ask(self, device: DeviceRelease, hook_bytes: int = 0) -> None:
        """Ask the processes that share memory on this device.

        A process with a pending request is not asked again: all can use what it returns. Raises
        OSError if the run directory cannot be read.
        """
        device.neighbor_requests = (device.neighbor_requests or 0) + 1
        for path in offering_neighbors(self._sample, device.record.device.uuid):
            request = sibling_path(path, REQUEST_SUFFIX)
            with ignore(OSError):
                if not _is_pending(request):
                    replace_file(request, encode(ReleaseRequest("neighbors", hook_bytes)))


def offering_neighbors(own: Path, uuid: str | None) -> Iterator[Path]:
    """Yield the samples of live processes that share memory on a device; `own` is left out."""
    for path, sample in live_neighbors(own):
        with ignore(ValueError, KeyError, TypeError):
            if _offers(sample, uuid):
                yield path


def live_neighbors(own: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the samples of live processes next to `own`, which is left out, with their paths."""
    processes = ProcessTable()
    paths = set(own.parent.glob(f"*{SAMPLE_SUFFIX}")) - {own}
    # Newest first: those of dead processes are older.
    for path in sorted(paths, key=_modified, reverse=True)[:MAX_NEIGHBORS]:
        with ignore(UntrustedFileError, OSError, ValueError, KeyError, TypeError, RecursionError):
            content = read_untrusted(path, MAX_SAMPLE_BYTES, os.geteuid())[0]
            sample = sanitize_json(json.loads(content))
            if processes.locate(convert(sample["process"], Process)).alive:
                yield path, sample


def _asleep_bytes(sample: dict[str, Any], uuid: str | None) -> int:
    """Return what the engine in a sample takes on a device when it wakes up."""
    return sum(_engine_parts(sample, uuid, "asleep").values())


def _awake_cache(sample: dict[str, Any], uuid: str | None) -> str | None:
    return awake_cache(_engine_parts(sample, uuid, "resident"))


def _engine_parts(sample: dict[str, Any], uuid: str | None, state: str) -> dict[str, int]:
    """Return the bytes of an engine's parts in a state on a device; empty without an engine."""
    with ignore(KeyError, TypeError, AttributeError, ValueError):
        devices = [each for each in sample["devices"] if each["uuid"] == uuid]
        engines = [each["engine"][state] for each in devices if each.get("engine")]
        return {part: int(size) for parts in engines for part, size in parts.items()}
    return {}


def _offers(sample: dict[str, Any], uuid: str | None) -> bool:
    """Return whether the process shares and has cached bytes on the device."""
    devices = sample["devices"]
    if not isinstance(devices, list):
        return False
    return uuid is not None and any(
        device["uuid"] == uuid and "neighbors" in device["releases"] for device in devices
    )


def _modified(path: Path) -> float:
    with ignore(OSError):
        return path.lstat().st_mtime
    return 0.0


def _is_pending(request: Path) -> bool:
    """Return whether there is a request that is still being served."""
    with ignore(FileNotFoundError):
        return is_fresh(request.lstat().st_mtime)
    return False
