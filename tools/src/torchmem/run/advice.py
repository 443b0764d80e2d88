"""The allocator setting that `torchmem run --apply-advice` adds after an OOM of the same run.

Everything follows from the run's OOM reports: ranks that read the same reports get the same
setting, and nothing has to be written. The report of an attempt that got a setting has it as the
label `advice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.remedies import OLD_VARIABLE, conf_variable, remedies
from torchmem.allocator.settings import (
    ADVICE_LABEL,
    ADVICE_VARIABLE,
    format_alloc_conf,
    requested_settings,
)
from torchmem.oom.command import load_all
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX, run_directory
from torchmem.sample.sample import decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_text


@dataclass(frozen=True, slots=True)
class Advice:
    """Environment variables to set, and one sentence that says so; both may be empty."""

    sentence: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def find_advice(run: str, environment: Mapping[str, str]) -> Advice:
    """Return what this user's reports in the run directory advise for the run of this name."""
    try:
        found = load_all(run_directory(environment), own_only=True)
    except UsageError:  # there is no report
        return Advice()
    name = sanitize_text(run)
    of_run = [(path, report) for path, report in found if report.process.run == name]
    return advise([report for path, report in of_run if not _survived(path)], environment)


def _survived(path: Path) -> bool:
    """Return whether the process of a report is known to have gone on after its OOM."""
    stem = path.name.rpartition("-")[0]
    with suppress(OSError, UntrustedFileError, UsageError, ValueError):
        sample = decode(read_untrusted(path.with_name(stem + SAMPLE_SUFFIX), MAX_SAMPLE_BYTES)[0])
        return sample.ended == "exited" or not (sample.oom_pending or sample.ended == "oom")
    return False


def advise(reports: Sequence[OomReport], environment: Mapping[str, str]) -> Advice:
    """Return what the OOMs of a run's earlier attempts advise, in any order.

    The newest OOM without advice decides. Its setting is withdrawn if an attempt that had it ended
    after no more steps than the attempt before it.
    """
    ordered = sorted(reports, key=lambda report: (report.timestamp, report.process.pid))
    plain = [report for report in ordered if ADVICE_LABEL not in report.process.labels]
    setting = _setting(plain[-1]) if plain else None
    if setting is None:
        return Advice()
    key, value = setting
    text = format_alloc_conf({key: value})
    if key in dict(requested_settings(environment)):
        return Advice(f"{key} stays as you set it.")
    vain = _vain_attempt(ordered, text)
    if vain:
        before, after = (f"{report.steps.count:,} steps" for report in vain)
        return Advice(
            f"{text} is not set again: the run ended after {after} with it, {before} without it."
        )
    return _addition(plain[-1], text, environment)


def _setting(report: OomReport) -> tuple[str, str] | None:
    """Return the setting that is the report's best remedy, if fragmentation was the cause."""
    if report.oom.cause != "fragmentation":
        return None
    best = remedies(report)[0]
    return (best.setting, best.value) if best.setting and best.value else None


def _vain_attempt(ordered: Sequence[OomReport], text: str) -> tuple[OomReport, OomReport] | None:
    """Return an OOM without advice and one with it, if the attempt with it ran no longer."""
    before = None
    for report in ordered:
        advice = report.process.labels.get(ADVICE_LABEL)
        if advice is None:
            before = report
        elif before and advice == text and report.steps.count <= before.steps.count:
            return before, report
    return None


def _addition(report: OomReport, text: str, environment: Mapping[str, str]) -> Advice:
    """Return the variables that add a setting to those of the environment."""
    variable = conf_variable(report.process.versions)
    if environment.get(OLD_VARIABLE):  # which every version of PyTorch reads first
        variable = OLD_VARIABLE
    present = environment.get(variable, "").strip().rstrip(",")
    conf = f"{present},{text}" if present else text
    steps = f"{report.steps.count:,} steps"
    return Advice(
        f"{text} is added to {variable}: the run ended after {steps}, out of memory by "
        "fragmentation.",
        {variable: conf, ADVICE_VARIABLE: text},
    )
