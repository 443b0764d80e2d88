"""`torchmem report`: one screen about a running rank, read from the run directory."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmem.cli.gpus import gpu_indices
from torchmem.cli.terminal import write_out
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import THRESHOLDS_VARIABLE, Limits, Thresholds, defaults
from torchmem.node.ranks import ProcessFilter, TrainingProcess, find_process
from torchmem.oom.command import load_all
from torchmem.pages import output
from torchmem.report import html, text
from torchmem.sample.errors import MissingExtraError, UsageError
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, run_directory
from torchmem.sample.sample import Process, Sample, decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_text

HELP = "show what holds a running rank's memory, what threatens it, and what to set"
EPILOG = """\
Examples:
  torchmem report --rank 3
  torchmem report --run nightly --json
  torchmem report --rank 3 --html rank3.html
"""
MAX_REPORTS = 100
"""The newest OOM reports that are looked at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--rank", type=int, metavar="N", help="global rank of the process")
    add(
        "--run",
        metavar="NAME",
        dest="run_name",
        help="name of its run; of several launches, the newest",
    )
    add("--launch", metavar="ID", help="its launch, as in the label `launch`")
    add("--pid", type=int, metavar="N", help="its process id")
    add("--json", action="store_true", help="print the sample, the threats and the advice as JSON")
    add("--html", metavar="FILE", type=Path, help="write the report as a page (- for stdout)")
    add("--run-dir", type=Path, metavar="DIR", help="run directory (default TORCHMEM_RUN_DIR)")
    add(
        "--thresholds",
        type=Path,
        metavar="FILE",
        help="your thresholds of `torchmem manifests rules` (default TORCHMEM_THRESHOLDS, else the "
        "shipped)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code. Raise MissingExtraError or UsageError."""
    if arguments.html:
        output.check(arguments.html)
    directory = arguments.run_dir or run_directory(os.environ)
    selected = ProcessFilter(arguments.rank, arguments.run_name, arguments.pid, arguments.launch)
    found = reported(directory, selected, arguments.thresholds)
    words = found.page()
    if arguments.html:
        subject = html.ReportedProcess(found.process, found.sample, found.now, found.gpus)
        output.write(html.page(subject, found.limits), arguments.html)
    if arguments.json:
        words = json.dumps(found.document(), allow_nan=False) + "\n"
    if arguments.html != output.STDOUT:
        write_out(words)
    return 0


@dataclass(frozen=True, slots=True)
class Reported:
    """A process with its newest sample at the time `now`, in Unix seconds, and how it is judged.

    `gpus` are NVML's indices by UUID, where known; `oom` is a report that concerns the process.
    """

    process: TrainingProcess
    sample: Sample
    now: float
    gpus: Mapping[str, int]
    limits: Limits
    oom: OomOnDisk | None

    def page(self) -> str:
        """Return the report as text."""
        words = text.page(self.sample, self.now, self.gpus, self.limits)
        if self.oom is None:
            return words
        return f"{self.oom.happened(self.now)}; to see why:\n  {self.oom.command}\n\n{words}"

    def document(self) -> dict[str, Any]:
        """Return the sample, the threats, the advice, and the file of the OOM report, for JSON."""
        path = str(self.oom.path) if self.oom else None
        return _document(self.sample, self.limits) | {"oom_report": path}


def reported(directory: Path, selected: ProcessFilter, thresholds: Path | None = None) -> Reported:
    """Return the process that the filter selects. Raise MissingExtraError or UsageError."""
    now, oom = time.time(), newest_oom(directory, selected)
    process = _find(directory, selected, oom, now)
    sample, gpus = load(process), gpu_indices()
    oom = oom if oom and oom.concerns(sample.process) else None
    limits = chosen_thresholds(thresholds).limits(sample.process.run, platform.node())
    return Reported(process, sample, now, gpus, limits, oom)


def _find(
    directory: Path, selected: ProcessFilter, oom: OomOnDisk | None, now: float
) -> TrainingProcess:
    """Return the process to show. Without one, raise UsageError, which leads to the newest OOM."""
    try:
        return find_process(directory, selected, or_ended=True)
    except UsageError as error:
        if oom is None:
            raise
        lead = f"But {oom.happened(now)}: `{oom.command}` explains why."
        raise UsageError(f"{error} {lead}") from None


@dataclass(frozen=True, slots=True)
class OomOnDisk:
    """The newest OOM report of the processes that the flags select; `timestamp` in Unix seconds."""

    path: Path
    process: Process
    timestamp: float

    def concerns(self, shown: Process) -> bool:
        """Return whether it happened in this process, or elsewhere since this process started."""
        same, other = (
            (process.pid, process.start_ticks, process.pid_namespace)
            for process in (shown, self.process)
        )
        start = shown.start_timestamp
        return same == other or (start is not None and self.timestamp > start)

    @property
    def command(self) -> str:
        """The command that explains it."""
        return f"torchmem oom {shlex.quote(sanitize_text(str(self.path)))}"

    def happened(self, now: float) -> str:
        """Return who ran out of memory and when."""
        who = f"rank {self.process.rank} of run {self.process.run} (pid {self.process.pid})"
        return f"{who} ran out of memory {format_seconds(now - self.timestamp)} ago"


def newest_oom(directory: Path, selected: ProcessFilter) -> OomOnDisk | None:
    """Return the newest OOM report of a process that the filter matches, of this user."""
    with suppress(UsageError):
        for path, report in load_all(directory, limit=MAX_REPORTS):
            if selected.selects(report.process):
                return OomOnDisk(path, report.process, report.timestamp)
    return None


def chosen_thresholds(given: Path | None) -> Thresholds:
    """Return the thresholds of the file, else of TORCHMEM_THRESHOLDS, else the shipped ones.

    Raise MissingExtraError or UsageError.
    """
    file = given or os.environ.get(THRESHOLDS_VARIABLE)
    if not file:
        return defaults()
    try:
        from torchmem.exporter import thresholds
    except ModuleNotFoundError as error:
        raise MissingExtraError("report --thresholds", error.name or "") from error
    return thresholds.load(Path(file))


def load(process: TrainingProcess) -> Sample:
    """Read the newest sample of a process. Raise UsageError if it cannot be used."""
    try:
        data, _ = read_untrusted(process.sample, MAX_SAMPLE_BYTES, process.uid)
        sample = decode(data)
    except FileNotFoundError:
        raise UsageError(f"{process} has ended.") from None
    except UntrustedFileError as error:
        raise UsageError(f"the sample of {process} {error}.") from None
    except (ValueError, RecursionError):
        raise UsageError(
            f"the sample of {process} is not valid: use the torchmem version of its process."
        ) from None
    if not sample.devices:
        raise UsageError(f"{process} has not used a GPU yet.")
    return sample


def _document(sample: Sample, limits: Limits) -> dict[str, Any]:
    """Return the sample, and for each of its devices the threats and the advice."""
    devices = [
        {
            "index": device.index,
            "threats": [asdict(threat) for threat in threats(sample, device, limits)],
            "advice": [asdict(remedy) for remedy in advice(sample, device, limits)],
        }
        for device in sample.devices
    ]
    return {"sample": asdict(sample), "devices": devices}
