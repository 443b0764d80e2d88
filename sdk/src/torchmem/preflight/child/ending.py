"""What is left for the parent: the report of this process, the trace, the explanation of an OOM."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmem.core import proc
from torchmem.core.rundir import REPORT_SUFFIX as OOM_REPORT_SUFFIX
from torchmem.core.rundir import SAMPLE_SUFFIX, run_directory, sample_name
from torchmem.preflight.orders import OOM_SUFFIX, REPORT_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.preflight.outcome import DeviceMemory
from torchmem.sdk._publish import replace_file


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
    own = sample_name(os.getpid(), proc.pid_namespace(), proc.own_start_ticks()).removesuffix(SAMPLE_SUFFIX)
    reports = run_directory(os.environ).glob(f"{own}-*{OOM_REPORT_SUFFIX}")
    return max(reports, key=lambda path: path.stat().st_mtime, default=None)
