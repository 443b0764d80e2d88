"""The allocator setting that `torchmem run --apply-advice` adds after an OOM of the same run.

Everything follows from the attempts in the run directory, and from the recording beside the newest
report if the attempt kept one, so ranks that read the same files get the same setting.
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

from torchmem.allocator.settings import (
    ADVICE_VARIABLE,
    VARIABLES,
    WITHDRAWN,
    format_alloc_conf,
    parse_alloc_conf,
    requested_settings,
)
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedies import conf_variable, torch_version
from torchmem.run.attempts import Attempt, find_attempts, in_vain
from torchmem.run.cure import (
    best_remedy,
    expected,
    is_material,
    may_be_cured,
    needed_room,
    not_added,
)
from torchmem.run.replay import SETTINGS, SINCE, Question, Replayed, replay
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX

Replay = Callable[[Path, Question], Replayed]


@dataclass(frozen=True, slots=True)
class SettingAdvice:
    """Environment variables to set, and a sentence that says so; both may be empty."""

    sentence: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def find_advice(
    run: str, environment: Mapping[str, str], torch: str | None = None, replay: Replay = replay
) -> SettingAdvice:
    """Return what this user's reports in the run directory advise for the run of this name.

    `torch` is the version of PyTorch that the command may use instead of the one reported.
    `replay` is as in `torchmem.run.replay`.
    """
    if environment.get(ADVICE_VARIABLE):  # of a `torchmem run` that has started this one
        return SettingAdvice()
    attempts = find_attempts(run, environment, time.time())
    without = [attempt for attempt in attempts if attempt.advice is None]
    if not without:
        return SettingAdvice()
    last = without[-1]
    versions = [last.report.process.versions, *([{"torch": torch}] if torch else [])]
    oldest = min(map(torch_version, versions))
    advice = SettingAdvice(not_added(last.report))
    if may_be_cured(last.report):
        advice = _advise(last, attempts, environment, oldest, replay)
    if not advice.environment and any(attempt.advice for attempt in attempts):
        return replace(advice, environment={ADVICE_VARIABLE: WITHDRAWN})
    return advice


def installed_torch() -> str | None:
    """Return the version of PyTorch in this environment, which may not be that of the command."""
    with suppress(PackageNotFoundError):
        return version_of("torch")
    return None


def _advise(
    last: Attempt,
    attempts: Sequence[Attempt],
    environment: Mapping[str, str],
    version: tuple[int, int],
    replay: Replay,
) -> SettingAdvice:
    """Return the advice after `last`, the newest attempt without a setting."""
    rule, recording = _rule(last.report, version), last.file(OOM_RECORDING_SUFFIX)
    users = dict(requested_settings(environment))
    settings = [
        text
        for text in dict.fromkeys([*filter(None, [rule]), *SETTINGS])
        if _is_known(text, version)
        and not parse_alloc_conf(text).keys() & users
        and not in_vain(attempts, text)
    ]
    if not settings or not _is_own_file(recording):
        return _by_rule(last, rule, attempts, environment)
    variable = _variable(last.report.process.versions, environment)
    present = parse_alloc_conf(environment.get(variable, ""))
    device, room = last.report.device.index, needed_room(last.report)
    found = replay(recording, Question(device, present, settings, room))
    if found.problem is not None:
        return _by_rule(last, rule, attempts, environment, found.problem)
    if found.enough is None:
        return SettingAdvice(_nothing_helps(last, found.failed))
    proof = f"; replayed with {found.enough}, memory suffices."
    return _addition(last, found.enough, environment, "by replay", proof)


def _is_own_file(path: Path) -> bool:
    """Return whether this user has a regular file there, in a directory that was checked."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _is_known(text: str, version: tuple[int, int]) -> bool:
    """Return whether this PyTorch knows all keys of a setting: it fails on an unknown one."""
    return all(version >= SINCE.get(key, (0, 0)) for key in parse_alloc_conf(text))


def _nothing_helps(last: Attempt, failed: Sequence[str]) -> str:
    tried = failed[0] if len(failed) == 1 else f"each of {len(failed)} settings"
    soon = " or soon after" if needed_room(last.report) else ""
    return f"no setting is added: {_ended(last)}; replayed with {tried}, it does so too{soon}."


def _ended(last: Attempt) -> str:
    cause = " by fragmentation" if is_material(last.report) else ""
    return f"the run ended after {last.steps}, out of memory{cause}"


def _by_rule(
    last: Attempt,
    rule: str | None,
    attempts: Sequence[Attempt],
    environment: Mapping[str, str],
    problem: str | None = None,
) -> SettingAdvice:
    """Return the report's first remedy, unless the user has set it or an attempt refuted it.

    `problem` is why the recording does not decide.
    """
    if rule is None:
        return SettingAdvice(not_added(last.report, problem))
    (key,) = parse_alloc_conf(rule)
    if key in dict(requested_settings(environment)):
        return SettingAdvice(f"{key} stays as you set it.")
    vain = in_vain(attempts, rule)
    if vain:
        before, after = vain
        return SettingAdvice(
            f"{rule} is not set again: the run ended after {after.steps} with it, "
            f"{before.steps} without it."
        )
    note = f". The recording does not show more: {problem}" if problem else "."
    return _addition(last, rule, environment, "by the report's rule", note)


def _rule(report: OomReport, version: tuple[int, int]) -> str | None:
    """Return the setting that is the report's best remedy, if it is one that matters.

    None as well if this PyTorch does not know it.
    """
    best = best_remedy(report)
    if not is_material(report) or not best or not best.setting or not best.value:
        return None
    text = format_alloc_conf({best.setting: best.value})
    return text if _is_known(text, version) else None


def _addition(
    last: Attempt, text: str, environment: Mapping[str, str], source: str, note: str
) -> SettingAdvice:
    """Return the variables that add a setting to those of the environment."""
    variable = _variable(last.report.process.versions, environment)
    present = environment.get(variable, "").strip().rstrip(",")
    conf = f"{present},{text}" if present else text
    return SettingAdvice(
        f"{text} is added to {variable} {source}: {_ended(last)}{expected(last.report)}{note}",
        {variable: conf, ADVICE_VARIABLE: text},
    )


def _variable(versions: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return the variable that PyTorch will read: the first that is set, even if empty."""
    read = conf_variable(versions)
    before = VARIABLES[: VARIABLES.index(read)]
    return next((variable for variable in before if variable in environment), read)
