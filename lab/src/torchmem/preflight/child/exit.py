"""Ends the script's process, and writes what the parent reads: report, trace, OOM report."""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from torchmem.host.procfs import own_start_ticks, pid_namespace
from torchmem.preflight.plan import OOM_SUFFIX, REPORT_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.preflight.result import ProcessReport
from torchmem.sample.run_directory import REPORT_SUFFIX as OOM_REPORT_SUFFIX
from torchmem.sample.run_directory import SAMPLE_SUFFIX, replace_file, run_directory, sample_name

_exit = os._exit  # the original, because before_leaving replaces it


def stop(sentence: str) -> NoReturn:
    """Print why the script cannot continue and end it with exit code 2, from any thread."""
    print(f"torchmem: {sentence}", file=sys.stderr)
    if threading.current_thread() is not threading.main_thread():
        leave(2)
    raise SystemExit(2)


def leave(exit_code: int) -> NoReturn:
    """End the process without Python's finalization, after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, None, or a pipe without a reader
            stream.flush()
    _exit(exit_code)


def before_leaving(callback: Callable[[], None]) -> None:
    """Run `callback` when the script calls `os._exit`, which skips atexit.

    multiprocessing does so in a forked child.
    """

    def exit_after_callback(status: int) -> NoReturn:
        try:
            callback()
        finally:
            _exit(status)

    os._exit = exit_after_callback


def peak_host_bytes() -> int:
    """Return the peak RAM of this process: VmHWM of proc(5).

    getrusage would include that of its parent before exec.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def values_read() -> int:
    """Return how often the host has read from a GPU, counted by the phantom GPU."""
    count = ctypes.CDLL(None).phantom_values_read
    count.restype = ctypes.c_ulonglong
    return int(count())


def write_report(folder: Path, report: ProcessReport) -> None:
    """Write `PID.report.json`, after copying the SDK's newest OOM report if there is one.

    The report is replaced atomically because the process may be killed at any time. Raises OSError.
    """
    oom_report = _newest_oom_report()
    if oom_report:
        shutil.copyfile(oom_report, folder / f"{os.getpid()}{OOM_SUFFIX}")
    replace_file(folder / f"{os.getpid()}{REPORT_SUFFIX}", json.dumps(asdict(report)).encode())


def write_trace(folder: Path, snapshot: Mapping[str, Any]) -> None:
    """Write `PID.snapshot.pickle`, for memory_viz and `torchmem whatif`. Raises OSError."""
    with (folder / f"{os.getpid()}{SNAPSHOT_SUFFIX}").open("wb") as file:
        pickle.dump(snapshot, file)


def _newest_oom_report() -> Path | None:
    """Return this process's newest OOM report in the run directory."""
    own = sample_name(os.getpid(), pid_namespace(), own_start_ticks()).removesuffix(SAMPLE_SUFFIX)
    reports = run_directory(os.environ).glob(f"*/{own}-*{OOM_REPORT_SUFFIX}")
    return max(reports, key=lambda path: path.stat().st_mtime, default=None)
