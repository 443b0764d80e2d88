"""Processes of one user that share a GPU, and how one asks the others for memory.

All of them have the tier `neighbors` of the setting `release`. Each offers itself in its sample;
the one that asks writes a request next to it. Nothing is read or written while none asks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchmem.host.process_table import ProcessTable
from torchmem.sample.process_messages import encode, sibling_path
from torchmem.sample.release_messages import REQUEST_SUFFIX, ReleaseRequest
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX, replace_file
from torchmem.sample.sample import Process
from torchmem.sample.untrusted import UntrustedFileError, convert, read_untrusted, sanitize_json
from torchmem.sdk.publish.request_files import is_fresh
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.interruptions import ignore

MAX_NEIGHBORS = 64
POLL_SECONDS = 0.02
# A neighbor that refused is asked again after this time.
ASK_SECONDS = 1.0

Take = Callable[[int, int], bool]
"""Takes bytes on a device; returns False if another process was faster."""


class Neighbors:
    """The other processes of this user in the run directory, next to this process's `sample`."""

    def __init__(
        self,
        sample: Path,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sample = sample
        self._recorder = recorder
        self._clock = clock
        self._sleep = sleep

    def wait(
        self,
        wanted: int,
        seconds: float,
        device: int | None,
        serve: Callable[[], None],
        take: Take | None = None,
    ) -> bool:
        """Wait until this process can get `wanted` bytes; return whether it can.

        Asks the neighbors, again while they refuse, and calls `serve` meanwhile, so that two
        processes that wait for each other both give. `device` is torch's index; by default the
        device on which this process has most memory. `take` gets the device and the bytes once
        they are there; waiting goes on while it returns False. Returns at once where nothing is
        known.
        """
        self._recorder.read_stats()
        record = self._record(device)
        if record is None:
            return False
        started = now = self._clock()
        asked, waited = -ASK_SECONDS, record.wait_seconds or 0.0
        while not (is_there := self._is_there(record, wanted, take)) and now < started + seconds:
            if now >= asked + ASK_SECONDS:
                asked = now
                with ignore(OSError):  # the memory may come without a request
                    self.ask(record)
            serve()
            self._sleep(POLL_SECONDS)
            now = self._clock()
            record.wait_seconds = waited + now - started
        return is_there

    def _is_there(self, record: DeviceRecord, wanted: int, take: Take | None) -> bool:
        if self._obtainable(record) < wanted:
            return False
        return take is None or take(record.device.index, wanted)

    def _record(self, device: int | None) -> DeviceRecord | None:
        records = self._recorder.records()
        if device is not None:
            return records.get(device)
        return max(records.values(), key=DeviceRecord.reserved_bytes, default=None)

    def _obtainable(self, record: DeviceRecord) -> int:
        """Return what the driver can give, and what this process has cached, in bytes."""
        index = record.device.index
        stats = self._recorder.backend.memory_stats(index)
        cached = 0
        if stats:
            reserved, active = (stats[name]["all"] for name in ("reserved_bytes", "active_bytes"))
            cached = reserved["current"] - active["current"]
        return int(cached) + self._recorder.obtainable_from_driver(index)

    def ask(self, record: DeviceRecord) -> int:
        """Ask those that share memory on this device; return how many.

        One that is being asked already is left alone: what it returns serves all. Raises OSError if
        the run directory cannot be read.
        """
        asked = 0
        record.neighbor_requests = (record.neighbor_requests or 0) + 1
        for path in offering_neighbors(self._sample, record.device.uuid):
            request = sibling_path(path, REQUEST_SUFFIX)
            with ignore(OSError):
                if not _is_pending(request):
                    replace_file(request, encode(ReleaseRequest("neighbors")))
                asked += 1
        return asked


def offering_neighbors(own: Path, uuid: str | None) -> Iterator[Path]:
    """Yield the samples of live processes that share memory on a device; `own` is left out."""
    processes = ProcessTable()
    paths = set(own.parent.glob(f"*{SAMPLE_SUFFIX}")) - {own}
    # Newest first: those of dead processes are older.
    for path in sorted(paths, key=_modified, reverse=True)[:MAX_NEIGHBORS]:
        with ignore(UntrustedFileError, OSError, ValueError, KeyError, TypeError, RecursionError):
            content = read_untrusted(path, MAX_SAMPLE_BYTES, os.geteuid())[0]
            sample = sanitize_json(json.loads(content))
            if (
                _offers(sample, uuid)
                and processes.locate(convert(sample["process"], Process)).alive
            ):
                yield path


def _offers(sample: dict[str, object], uuid: str | None) -> bool:
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
    """Return whether a request is there that is still served."""
    with ignore(FileNotFoundError):
        return is_fresh(request.lstat().st_mtime)
    return False
