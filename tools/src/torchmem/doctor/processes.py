"""Checks of the processes that publish, and of the allocator settings in effect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchmem.doctor.check import Check
from torchmem.explain.rank_report import HOW_TO_COUNT_STEPS
from torchmem.node.ranks import TrainingProcess, training_processes
from torchmem.output.terminal import first_of
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import SAMPLE_SUFFIX, find_files, is_user_directory
from torchmem.sample.sample import Process, Sample, read_sample
from torchmem.sample.untrusted import sanitize_text

MAX_NAMED = 5


def checks(directory: Path) -> Iterator[Check]:
    """Yield the checks of this user's processes; root checks those of all users."""
    try:
        found = list(training_processes(directory))
    except UsageError as error:
        yield Check("processes", "note", str(error), f"As root: chmod a+r {directory}")
        return
    yield _counts(found) if found else _none(directory)
    running = [item for item in found if item.alive is not False]
    samples = [sample for item in running if (sample := read_sample(item.sample, item.uid))]
    yield from _in_force(samples)
    yield from _ignored(samples)
    yield from _uncounted(samples)


def running(directory: Path) -> list[Process]:
    """Return this user's processes that run; none if the directory cannot be read."""
    try:
        return [item.process for item in training_processes(directory) if item.alive]
    except UsageError:
        return []


def _counts(found: Sequence[TrainingProcess]) -> Check:
    states = Counter("ended" if item.alive is False else "running" for item in found)
    runs = {sanitize_text(item.process.run) for item in found}
    counted = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return Check("processes", "ok", f"{counted}; runs: {_listed(runs)}")


def _none(directory: Path) -> Check:
    users = sum(is_user_directory(entry.name) for entry in os.scandir(directory))
    files = find_files(directory, lambda name: name.endswith(SAMPLE_SUFFIX))
    others = f"; {len(files)} of other users" if files else ""
    return Check(
        "processes",
        "note",
        f"none of your processes has published here{others} ({users} user directories)",
        "A process publishes after sdk.instrument(), once it allocates GPU memory.",
    )


def _in_force(samples: Sequence[Sample]) -> Iterator[Check]:
    """Yield each combination of settings that PyTorch's allocator reports."""
    variants = Counter(tuple(sorted(sample.allocator_settings.items())) for sample in samples)
    for settings, number in variants.most_common(MAX_NAMED):
        text = ", ".join(sanitize_text(f"{name}={value}") for name, value in settings if value)
        processes = "1 process" if number == 1 else f"{number} processes"
        yield Check("settings in effect", "ok", f"{text or 'unknown'} ({processes})")


def _ignored(samples: Sequence[Sample]) -> Iterator[Check]:
    """Yield a problem for each setting of the environment that had no effect."""
    ignored = {
        (sanitize_text(name), sanitize_text(sample.process.run))
        for sample in samples
        for name, is_ignored in sample.settings_ignored.items()
        if is_ignored
    }
    for name in sorted({name for name, _ in ignored}):
        runs = _listed({run for ignored_name, run in ignored if ignored_name == name})
        yield Check(
            "settings ignored",
            "problem",
            f"{name} has no effect in {runs}",
            "See the runbook TorchmemAllocatorSettingIgnored.",
        )


def _uncounted(samples: Sequence[Sample]) -> Iterator[Check]:
    """Yield how to count the steps of runs of which none was counted."""
    runs = {sanitize_text(sample.process.run) for sample in samples if not sample.steps.count}
    if runs:
        yield Check("steps", "note", f"none counted in {_listed(runs)}", HOW_TO_COUNT_STEPS)


def _listed(names: set[str]) -> str:
    return first_of(sorted(names), MAX_NAMED)
