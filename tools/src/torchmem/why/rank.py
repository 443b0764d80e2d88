"""Why a rank's memory is as it is: its newest sample, judged by the thresholds of the alerts."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchmem.explain.oom_report import format_seconds
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import THRESHOLDS_VARIABLE, Limits, Thresholds, defaults
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.ranks import ProcessFilter, TrainingProcess, find_process, training_processes
from torchmem.node.reports import load_all
from torchmem.node.words import rank_page
from torchmem.output.terminal import wrapped
from torchmem.sample.errors import MissingExtraError, UsageError
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES
from torchmem.sample.sample import DeviceSample, Process, Sample, decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_text
from torchmem.why.recorded_cure import recorded_cure

MAX_REPORTS = 100
"""The newest OOM reports that are looked at."""


@dataclass(frozen=True, slots=True)
class OomOnDisk:
    """The newest OOM report of the processes that the flags select; `timestamp` in Unix seconds."""

    path: Path
    process: Process
    timestamp: float

    def is_of(self, shown: Process) -> bool:
        """Return whether it happened in this process."""
        same, other = (
            (process.pid, process.start_ticks, process.pid_namespace)
            for process in (shown, self.process)
        )
        return same == other

    def concerns(self, shown: Process) -> bool:
        """Return whether it happened in this process, or elsewhere since this process started."""
        start = shown.start_timestamp
        return self.is_of(shown) or (start is not None and self.timestamp > start)

    def happened(self, now: float) -> str:
        """Return who ran out of memory and when."""
        who = f"rank {self.process.rank} of run {self.process.run} (pid {self.process.pid})"
        return f"{who} ran out of memory {format_seconds(now - self.timestamp)} ago"


@dataclass(frozen=True, slots=True)
class ReportedRank:
    """A process with its newest sample at the time `now`, in Unix seconds, and how it is judged.

    `gpus` are NVML's indices by UUID, where known; `oom` is a report that concerns the process.
    `chosen` is why this process is shown, if nothing selected it.
    """

    process: TrainingProcess
    sample: Sample
    now: float
    gpus: Mapping[str, int]
    limits: Limits
    oom: OomOnDisk | None = None
    chosen: str = ""

    def words(self) -> str:
        """Return the report of the process."""
        words = rank_page(self.sample, self.now, self.gpus, self.limits, self._replays())
        if self.oom is not None:
            command = f"torchmem why {shlex.quote(sanitize_text(str(self.oom.path)))}"
            words = f"{self.oom.happened(self.now)}; to see why:\n  {command}\n\n{words}"
        if self.chosen:
            words = "\n".join([*wrapped(self.chosen), "", words])
        return words

    def json_lines(self) -> list[str]:
        """Return the sample, and for each device the threats and the advice; the OOM's file.

        `replay` is what a replay shows about the advised setting, None without a recording.
        """
        sample = self.sample
        document = {
            "sample": asdict(sample),
            "devices": [self._device(device) for device in sample.devices],
            "oom_report": str(self.oom.path) if self.oom else None,
        }
        return [json.dumps(document, allow_nan=False)]

    def _device(self, device: DeviceSample) -> dict[str, Any]:
        found, judged = (self.sample, device, self.limits), asdict
        return {
            "index": device.index,
            "threats": [judged(threat) for threat in threats(*found)],
            "advice": [judged(remedy) for remedy in advice(*found)],
            "replay": recorded_cure(*found, self.process.sample),
        }

    def _replays(self) -> dict[int, str]:
        """Return what replays show about the setting to set, by torch's index of the device."""
        shown = {
            device.index: recorded_cure(self.sample, device, self.limits, self.process.sample)
            for device in self.sample.devices
        }
        return {index: sentence for index, sentence in shown.items() if sentence}

    def page(self) -> bytes:
        """Return the page."""
        from torchmem.pages.rank import ReportedProcess, page

        subject = ReportedProcess(self.process, self.sample, self.now, self.gpus)
        return page(subject, self.limits, self._replays())


def rank_answer(
    directory: Path, selected: ProcessFilter, thresholds: Path | None = None
) -> ReportedRank | OomOnDisk:
    """Return the process that the filter selects, or the OOM report of one that died of it.

    Raise MissingExtraError or UsageError.
    """
    oom = newest_oom(directory, selected)
    try:
        process = find_process(directory, selected, or_ended=True)
    except UsageError:
        if oom is None:
            raise
        return oom
    sample = load_sample(process)
    if oom is not None and sample.ended == "oom" and oom.is_of(sample.process):
        return oom
    answer = _answer(process, sample, thresholds)
    return replace(answer, oom=oom if oom and oom.concerns(sample.process) else None)


def worst_rank(directory: Path, thresholds: Path | None = None) -> ReportedRank | None:
    """Return the running process of this user that is worst off; None if none runs.

    What is threatened comes first, then what has the smallest share of its GPU left. Raise
    MissingExtraError or UsageError.
    """
    answers = []
    for process in training_processes(directory):
        if process.alive is not False:
            with suppress(UsageError):
                answers.append(_answer(process, load_sample(process), thresholds))
    if not answers:
        return None
    worst = min(answers, key=_ease)
    return replace(worst, chosen=_reason(worst, answers))


def answer_about(process: TrainingProcess, thresholds: Path | None = None) -> ReportedRank:
    """Return the answer about one process. Raise MissingExtraError or UsageError."""
    return _answer(process, load_sample(process), thresholds)


def _answer(process: TrainingProcess, sample: Sample, thresholds: Path | None) -> ReportedRank:
    limits = chosen_thresholds(thresholds).limits(sample.process.run, platform.node())
    return ReportedRank(process, sample, time.time(), gpu_indices(), limits)


def _ease(answer: ReportedRank) -> tuple[bool, float, int]:
    """Return a key that is lower the worse off a process is."""
    devices = answer.sample.devices
    is_safe = not any(threats(answer.sample, device, answer.limits) for device in devices)
    return is_safe, min(map(_share_left, devices)), answer.sample.process.rank


def _share_left(device: DeviceSample) -> float:
    left = device.layout.headroom_flush_bytes if device.layout else None
    return 1.0 if left is None or not device.total_bytes else left / device.total_bytes


def _reason(worst: ReportedRank, answers: Sequence[ReportedRank]) -> str:
    if len(answers) == 1:
        return ""
    return (
        f"Of your {len(answers)} running processes, {worst.process} is worst off; to see another "
        "one, pass --rank, --run or --pid."
    )


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
        raise MissingExtraError("why --thresholds", error.name or "") from error
    return thresholds.load(Path(file))


def load_sample(process: TrainingProcess) -> Sample:
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
