"""The allocator setting that `torchmem run --apply-advice` adds after an OOM of the same run.

Everything follows from the run's OOM reports, and from the recording beside the newest one if the
attempt kept one: ranks that read the same files get the same setting, and nothing has to be
written. The report of an attempt that got a setting has it as the label `advice`.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.remedies import conf_variable, remedies, torch_version
from torchmem.allocator.settings import (
    ADVICE_LABEL,
    ADVICE_VARIABLE,
    VARIABLES,
    WITHDRAWN,
    format_alloc_conf,
    parse_alloc_conf,
    requested_settings,
)
from torchmem.oom.command import load_all
from torchmem.run.replay import SETTINGS, SINCE, Replayed, replay
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX, run_directory
from torchmem.sample.sample import decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_text

MAX_REPORTS = 64
"""The newest reports that are read: all that the SDK keeps."""
MAX_AGE_SECONDS = 30 * 24 * 3600.0
"""Older reports count no more, so that a setting that is not needed any longer ends."""

Replay = Callable[[Path, int, Mapping[str, str], Sequence[str]], Replayed]


@dataclass(frozen=True, slots=True)
class Advice:
    """Environment variables to set, and one sentence that says so; both may be empty."""

    sentence: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that ran out of memory: its report, and the path of that."""

    path: Path
    report: OomReport

    @property
    def advice(self) -> str | None:
        """The setting that it got, as text; None without one."""
        text = self.report.process.labels.get(ADVICE_LABEL)
        return None if text == WITHDRAWN else text

    @property
    def steps(self) -> str:
        """The number of steps that it finished, in words."""
        count = self.report.steps.count
        return f"{count:,} step{'s' * (count != 1)}"


def find_advice(
    run: str, environment: Mapping[str, str], torch: str | None = None, replay: Replay = replay
) -> Advice:
    """Return what this user's reports in the run directory advise for the run of this name.

    `torch` is the version of PyTorch that the command may use instead of the one reported.
    `replay` is that of `torchmem.run.replay`.
    """
    if environment.get(ADVICE_VARIABLE):  # of a `torchmem run` that has started this one
        return Advice()
    attempts = _attempts(run, environment, time.time())
    without = [attempt for attempt in attempts if attempt.advice is None]
    if not without or without[-1].report.oom.cause != "fragmentation":
        return Advice()
    versions = [without[-1].report.process.versions, *([{"torch": torch}] if torch else [])]
    oldest = min(map(torch_version, versions))
    advice = _advise(without[-1], attempts, environment, oldest, replay)
    if not advice.environment and any(attempt.advice for attempt in attempts):
        return replace(advice, environment={ADVICE_VARIABLE: WITHDRAWN})
    return advice


def installed_torch() -> str | None:
    """Return the version of PyTorch in this environment, which may not be that of the command."""
    with suppress(PackageNotFoundError):
        return version_of("torch")
    return None


def _attempts(run: str, environment: Mapping[str, str], now: float) -> list[Attempt]:
    """Return the attempts of a run that ended by an OOM, the oldest first."""
    try:
        found = load_all(run_directory(environment), own_only=True, limit=MAX_REPORTS)
    except UsageError:  # there is no report
        return []
    name = sanitize_text(run)
    attempts = [
        Attempt(path, report)
        for path, report in found
        if report.process.run == name
        and abs(now - report.timestamp) <= MAX_AGE_SECONDS
        and not (report.survived or _survived(path))
    ]
    return sorted(attempts, key=lambda each: (each.report.timestamp, each.report.process.pid))


def _survived(path: Path) -> bool:
    """Return whether the process of a report is known to have gone on after its OOM."""
    with suppress(OSError, UntrustedFileError, UsageError, ValueError):
        sample = decode(read_untrusted(_beside(path, SAMPLE_SUFFIX), MAX_SAMPLE_BYTES)[0])
        return sample.ended == "exited" or not (sample.oom_pending or sample.ended == "oom")
    return False


def _beside(report: Path, suffix: str) -> Path:
    """Return the path of another file of the process of a report."""
    return report.with_name(report.name.rpartition("-")[0] + suffix)


def _advise(
    last: Attempt,
    attempts: Sequence[Attempt],
    environment: Mapping[str, str],
    version: tuple[int, int],
    replay: Replay,
) -> Advice:
    """Return the advice after `last`, the newest attempt without a setting."""
    rule, recording = _rule(last.report, version), _beside(last.path, OOM_RECORDING_SUFFIX)
    users = dict(requested_settings(environment))
    settings = [
        text
        for text in dict.fromkeys([*filter(None, [rule]), *SETTINGS])
        if _is_known(text, version)
        and not parse_alloc_conf(text).keys() & users
        and not _vain(attempts, text)
    ]
    if not settings or not _is_own_file(recording):
        return _by_rule(last, rule, attempts, environment)
    variable = _variable(last.report.process.versions, environment)
    present = parse_alloc_conf(environment.get(variable, ""))
    found = replay(recording, last.report.device.index, present, settings)
    if found.problem is not None:
        return _by_rule(last, rule, attempts, environment, found.problem)
    if found.enough is None:
        return Advice(_nothing_helps(last, found.failed))
    proof = f"; replayed with {found.enough}, memory suffices."
    return _addition(last, found.enough, environment, "by replay", proof)


def _is_own_file(path: Path) -> bool:
    """Return whether this user has a regular file there, in a directory that was checked."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _is_known(text: str, version: tuple[int, int]) -> bool:
    """Return whether this PyTorch knows all keys of a setting: it stops at one that it does not."""
    return all(version >= SINCE.get(key, (0, 0)) for key in parse_alloc_conf(text))


def _nothing_helps(last: Attempt, failed: Sequence[str]) -> str:
    tried = failed[0] if len(failed) == 1 else f"each of {len(failed)} settings"
    return (
        f"no setting is added: the run ended after {last.steps}, out of memory by fragmentation; "
        f"replayed with {tried}, it does so too."
    )


def _by_rule(
    last: Attempt,
    rule: str | None,
    attempts: Sequence[Attempt],
    environment: Mapping[str, str],
    problem: str | None = None,
) -> Advice:
    """Return the report's first remedy, unless the user has set it or an attempt refuted it.

    `problem` is why the recording does not decide.
    """
    if rule is None:
        return Advice()
    (key,) = parse_alloc_conf(rule)
    if key in dict(requested_settings(environment)):
        return Advice(f"{key} stays as you set it.")
    vain = _vain(attempts, rule)
    if vain:
        before, after = vain
        return Advice(
            f"{rule} is not set again: the run ended after {after.steps} with it, "
            f"{before.steps} without it."
        )
    note = f". The recording does not tell more: {problem}" if problem else "."
    return _addition(last, rule, environment, "by the report's rule", note)


def _rule(report: OomReport, version: tuple[int, int]) -> str | None:
    """Return the setting that is the report's best remedy, unless this PyTorch does not know it."""
    best = remedies(report)[0]
    if not best.setting or not best.value:
        return None
    text = format_alloc_conf({best.setting: best.value})
    return text if _is_known(text, version) else None


def _vain(attempts: Sequence[Attempt], text: str) -> tuple[Attempt, Attempt] | None:
    """Return an attempt without advice and one with it, if the latter ran no longer."""
    before = None
    for attempt in attempts:
        if attempt.advice is None:
            before = attempt
        elif (
            before
            and attempt.advice == text
            and attempt.report.steps.count <= before.report.steps.count
        ):
            return before, attempt
    return None


def _addition(
    last: Attempt, text: str, environment: Mapping[str, str], source: str, note: str
) -> Advice:
    """Return the variables that add a setting to those of the environment."""
    variable = _variable(last.report.process.versions, environment)
    present = environment.get(variable, "").strip().rstrip(",")
    conf = f"{present},{text}" if present else text
    return Advice(
        f"{text} is added to {variable} {source}: the run ended after {last.steps}, out of memory "
        f"by fragmentation{note}",
        {variable: conf, ADVICE_VARIABLE: text},
    )


def _variable(versions: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return the variable that PyTorch will read: the first that is set, even to nothing."""
    read = conf_variable(versions)
    before = VARIABLES[: VARIABLES.index(read)]
    return next((variable for variable in before if variable in environment), read)
