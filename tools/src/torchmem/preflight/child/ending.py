"""How the script's process ends: by us, when it cannot go on or is done, or by its own hand past Python's exit.

What is left for the parent: the report of this process, the trace, the explanation of an OOM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchmem.preflight.outcome import DeviceMemory
from torchmem.preflight.plan import OOM_SUFFIX, REPORT_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.sample.procfs import own_start_ticks, pid_namespace
from torchmem.sample.run_directory import REPORT_SUFFIX as OOM_REPORT_SUFFIX
from torchmem.sample.run_directory import SAMPLE_SUFFIX, replace_file, run_directory, sample_name

_leave = os._exit  # itself, also where the script's is watched


def stop(sentence: str) -> NoReturn:
    """Say why it does not go on, and end the script with exit code 2, whichever of its threads this is."""
    print(f"torchmem: {sentence}", file=sys.stderr)
    if threading.current_thread() is not threading.main_thread():
        leave(2)
    raise SystemExit(2)


def leave(exit_code: int) -> NoReturn:
    """End the process at once, without Python's exit; what the script has printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None, or a pipe that nobody reads
            stream.flush()
    _leave(exit_code)


def before_leaving(callback: Callable[[], None]) -> None:
    """Run `callback` when the script calls `os._exit`, as multiprocessing does in a forked child; atexit is skipped."""

    def watched(status: int) -> NoReturn:
        try:
            callback()
        finally:
            _leave(status)

    os._exit = watched


@dataclass(frozen=True, slots=True)
class Report:
    """What one process says at its end; `preflight.reading` makes the outcome of it.

    stopped: by us, after the steps wanted. message: of the error that nobody caught. host_bytes: most RAM of this
    process. values_read: how often the host has read from a card.
    """

    stopped: bool
    steps: int
    out_of_memory: bool
    message: str | None
    devices: tuple[DeviceMemory, ...]
    host_bytes: int
    values_read: int


def most_host_bytes() -> int:
    """Most RAM of this process so far (VmHWM, proc(5)); getrusage would count its parent's before exec too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def values_read() -> int:
    """How often the host has read from a card; the phantom counts."""
    count = ctypes.CDLL(None).phantom_values_read
    count.restype = ctypes.c_ulonglong
    return int(count())


def write_report(folder: Path, report: Report) -> None:
    """Write `PID.report.json`, and before it the newest report of an OOM, where the SDK left one. Raises OSError.

    The report is there as a whole or not at all, as the process may be killed at any moment.
    """
    explanation = newest_oom_report()
    if explanation:
        shutil.copyfile(explanation, folder / f"{os.getpid()}{OOM_SUFFIX}")
    replace_file(folder / f"{os.getpid()}{REPORT_SUFFIX}", json.dumps(asdict(report)).encode())


def write_trace(folder: Path, snapshot: Mapping[str, Any]) -> None:
    """Write `PID.snapshot.pickle`, for memory_viz and `torchmem whatif`. Raises OSError."""
    with (folder / f"{os.getpid()}{SNAPSHOT_SUFFIX}").open("wb") as file:
        pickle.dump(snapshot, file)


def newest_oom_report() -> Path | None:
    """This process's newest report in the run directory."""
    own = sample_name(os.getpid(), pid_namespace(), own_start_ticks()).removesuffix(SAMPLE_SUFFIX)
    reports = run_directory(os.environ).glob(f"{own}-*{OOM_REPORT_SUFFIX}")
    return max(reports, key=lambda path: path.stat().st_mtime, default=None)
