"""Run a command on phantom GPUs, plain and with torchmem, and tell what differs.

The output is compared without its numbers and its order: losses, times, and ranks that print first.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from torchmem.metrics import catalog

GPU = "h100-80gb"
WAYS = PLAIN, VARIABLE, RUN = ("plain", "TORCHMEM=1", "torchmem run")
_NUMBER = re.compile(r"0x[0-9a-f]+|nan|inf|[-+]?\d[\d.,:e+-]*")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a command left behind: its exit code, its output, the exporter's page."""

    code: int
    lines: Sequence[str]
    errors: Sequence[str]
    page: str = ""

    @property
    def shape(self) -> list[str]:
        """The lines of its output without numbers, sorted, as ranks print in any order."""
        return sorted(_NUMBER.sub("N", line) for line in self.lines)

    @property
    def error_shape(self) -> list[str]:
        """The same of its standard error."""
        return sorted(_NUMBER.sub("N", line) for line in self.errors)


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
        page = "" if way == PLAIN else self._scrape(run_dir)
        return Outcome(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), page)

    def _scrape(self, run_dir: Path) -> str:
        command = [self.python, "-m", "torchmem.cli", "exporter", "--once"]
        done = subprocess.run(
            [*command, "--run-dir", str(run_dir)], capture_output=True, text=True, check=True
        )
        return done.stdout


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
    """Yield which of exit code, stdout and stderr differ."""
    if plain.code != other.code:
        yield f"exit code {plain.code}, then {other.code}"
    if plain.shape != other.shape:
        yield "stdout"
    if plain.error_shape != other.error_shape:
        yield "stderr"
