"""Run a command on phantom GPUs, plain and with torchmem, and tell what differs.

The output is compared without its order and without words with a digit: losses, times, random
names, and ranks that print first.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from torchmem.metrics import catalog

GPU = "h100-80gb"
WAYS = PLAIN, VARIABLE, RUN = ("plain", "TORCHMEM=1", "torchmem run")
_CHANGING = re.compile(r"[\w.,:+-]*\d[\w.,:+-]*|\bnan\b|\binf\b|tmp[a-z_]{8}")
MAX_SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a command left behind: its exit code, its output, the exporter's page.

    cpu_seconds: of the command and of all that it started and waited for.
    """

    code: int
    lines: Sequence[str]
    errors: Sequence[str]
    page: str = ""
    cpu_seconds: float = 0.0

    @property
    def shape(self) -> list[str]:
        """The lines of its output without numbers, sorted, as ranks print in any order."""
        return sorted(_CHANGING.sub("N", line) for line in self.lines)

    @property
    def error_shape(self) -> list[str]:
        """The same of its standard error."""
        return sorted(_CHANGING.sub("N", line) for line in self.errors)


@dataclass(frozen=True, slots=True)
class Published:
    """What the exporter shows of one process."""

    steps: int | None
    peak_bytes: int | None
    state: str
    run: str


@dataclass(frozen=True, slots=True)
class Command:
    """What is run, in which folder, by which Python, and on how many phantom GPUs."""

    words: Sequence[str]
    folder: Path
    python: str
    gpus: int = 1
    timeout: float = 600.0
    environment: Mapping[str, str] | None = None

    def run(self, way: str, state: Path) -> Outcome:
        """Run it once in one of WAYS; `state` is an empty folder.

        Raises:
            subprocess.TimeoutExpired: it took too long.
        """
        flags = ("--gpu-model", GPU, "--gpus", str(self.gpus), "--state", str(state / "gpus"))
        words = [self.python, "-m", "torchmem.phantom", *flags, "--"]
        run_dir = state / "run"
        variables = dict(self.environment or {})
        if way == RUN:
            words += [self.python, "-m", "torchmem.cli", "run", "--run-dir", str(run_dir), "--"]
        elif way == VARIABLE:
            run_dir.mkdir(parents=True)
            variables |= {"TORCHMEM": "1", "TORCHMEM_RUN_DIR": str(run_dir)}
        before = _cpu_seconds()
        done = subprocess.run(
            [*words, *self.words],
            cwd=self.folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=self.timeout,
            check=False,
        )
        used = _cpu_seconds() - before
        page = "" if way == PLAIN else self._scrape(run_dir)
        return Outcome(
            done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), page, used
        )

    def _scrape(self, run_dir: Path) -> str:
        command = [self.python, "-m", "torchmem.cli", "exporter", "--once"]
        done = subprocess.run(
            [*command, "--run-dir", str(run_dir)], capture_output=True, text=True, check=True
        )
        return done.stdout


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def published(page: str) -> list[Published]:
    """Return what the exporter shows of each process of a job."""
    found: dict[str, dict[str, float]] = {}
    states: dict[str, tuple[str, str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            pid = sample.labels.get("pid", "")
            if sample.name == catalog.PROCESS_STATE.name and sample.value:
                states[pid] = sample.labels["state"], sample.labels.get("run", "")
            elif pid:
                values = found.setdefault(sample.name, {})
                values[pid] = values.get(pid, 0) + sample.value
    steps = found.get(catalog.STEPS.name, {})
    peaks = found.get(catalog.ALLOCATED_PEAK.name, {})
    return [
        Published(_whole(steps.get(pid)), _whole(peaks.get(pid)), state, run)
        for pid, (state, run) in states.items()
    ]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def differences(plain: Outcome, other: Outcome) -> Iterator[str]:
    """Yield which of exit code, stdout and stderr differ, with the first lines that do."""
    if plain.code != other.code:
        yield f"exit code {plain.code}, then {other.code}"
    for name, before, after in (
        ("stdout", plain.shape, other.shape),
        ("stderr", plain.error_shape, other.error_shape),
    ):
        if before != after:
            yield f"{name}: {_changed(before, after)}"


def _changed(before: Sequence[str], after: Sequence[str]) -> str:
    lost, new = Counter(before), Counter(after)
    lines = [f"- {line}" for line in lost - new] + [f"+ {line}" for line in new - lost]
    return " | ".join(lines[:MAX_SHOWN_LINES])
