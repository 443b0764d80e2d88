"""Run the test suites of other projects plain, with TORCHMEM=1 and under `torchmem run`:

    make test-suites                          # all of them; goes on where it stopped
    make test-suites ARGS='--only joblib --again'
    make test-suites ARGS='--agent newrelic'  # the same below that agent in each way

Releases are cloned from GitHub, and each has an environment of its own under .venv-programs/, with
torchmem from its wheel. Suites that use CUDA run on phantom GPUs, and none reaches the network.
Suites with a test whose outcomes differ run again in each way. A test is changed if both of its
outcomes with torchmem differ from both of its plain ones in one of the ways, and unstable
otherwise. The exit code is 1 if a test is changed. `--write` publishes the results for the
documentation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from experiments.monitored_runs import PLAIN, RUN, VARIABLE, WAYS
from experiments.programs.environment import (
    FOLDER,
    InstallError,
    built_wheel,
    environment,
    versions,
)
from experiments.suites.cpython import CPYTHON, write_tests
from experiments.suites.results import ALL, PUBLISHED, Result, load, save, state
from experiments.suites.table import Suite

CHECKOUTS = FOLDER / "checkouts"
TIMEOUT_SECONDS = 3600
GITHUB = "https://github.com"
# Names of tests by their outcome, from a file in JUnit's format.
Outcomes = Mapping[str, str]

AGENTS = {
    "newrelic": ("newrelic-admin", "run-program"),
    "ddtrace": ("ddtrace-run",),
    "opentelemetry": ("opentelemetry-instrument",),
}
AGENT_PACKAGES = {
    "newrelic": ("newrelic==14.1.0",),
    "ddtrace": ("ddtrace==4.16.0",),
    "opentelemetry": ("opentelemetry-distro==0.66b2",),
}
SILENT = {
    "NEW_RELIC_DEVELOPER_MODE": "true",
    "NEW_RELIC_HOST": "127.0.0.1",
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
}


class SuiteError(Exception):
    """A suite did not run; the text says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """A suite in one environment, with a folder for its files, and the agent it runs below."""

    suite: Suite
    python: Path
    checkout: Path
    folder: Path
    agent: str = ""

    def run(self, way: str) -> Outcomes:
        """Return the outcomes of all tests in one way. Raise SuiteError without a report."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [*self._prefix(way), str(self.python), *self._arguments(report)],
            cwd=self.checkout,
            env=self._environment(way),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if not report.exists():
            lines = done.stdout.decode(errors="replace").strip().splitlines()
            raise SuiteError(f"{way}: ends with {done.returncode}: {' '.join(lines[-3:])[:400]}")
        return read_outcomes(report)

    def _prefix(self, way: str) -> list[str]:
        hook = [str(self.python), "-m", "torchmem.cli", "run", "--"] if way == RUN else []
        if not self.agent:
            return hook
        program, *words = AGENTS[self.agent]
        return [*hook, str(self.python.with_name(program)), *words]

    def _arguments(self, report: Path) -> list[str]:
        if self.suite is CPYTHON:
            options = (f"--testdir={self.checkout}", f"--junit-xml={report}")
            return ["-m", "test", *options, *self.suite.tests]
        gpus = str(self.suite.gpus)
        phantom = ["-m", "torchmem.phantom", "--gpus", gpus, "--", str(self.python)]
        return [
            *(phantom if self.suite.gpus else []),
            *("-m", "pytest", "--override-ini=addopts=", "--timeout=300"),
            *("-p", "no:cacheprovider", f"--junit-xml={report}"),
            *self.suite.arguments,
            *self.suite.tests,
        ]

    def _environment(self, way: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "TORCHMEM" not in name}
        switch = {"TORCHMEM": "1"} if way == VARIABLE else {}
        run_dir = self.folder / "run"
        run_dir.mkdir(exist_ok=True)
        return {
            **kept,
            **SILENT,
            **switch,
            "TORCHMEM_RUN_DIR": str(run_dir),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
        }


def read_outcomes(report: Path) -> Outcomes:
    """Return passed, failed, error or skipped by test, or both if two runs of it differ."""
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own subprocess wrote it
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcome = _outcome(case)
        before = outcomes.get(name, outcome)
        outcomes[name] = outcome if before == outcome else f"{before}+{outcome}"
    return outcomes


def _outcome(case: ET.Element) -> str:
    tags = [child.tag for child in case]
    found = [tag for tag in ("error", "failure", "skipped") if tag in tags]
    return found[0] if found else "passed"


def differences(outcomes: Mapping[str, Outcomes]) -> list[str]:
    """Return the tests whose outcome is not the same in each way."""
    names = {name for found in outcomes.values() for name in found}
    return sorted(name for name in names if len({outcomes[way].get(name) for way in WAYS}) > 1)


def is_changed(name: str, *runs: Mapping[str, Outcomes]) -> bool:
    """Return whether the outcome of a test differs from each plain one whenever torchmem runs."""
    found = {way: {run[way].get(name) for run in runs} for way in WAYS}
    return any(found[PLAIN].isdisjoint(found[way]) for way in (VARIABLE, RUN))


def tried(suite: Suite, wheel: Path, agent: str = "") -> Result:
    """Install a suite, and run it in every way."""
    extra = AGENT_PACKAGES[agent] if agent else ()
    try:
        folder = environment((*suite.requirements, *extra), wheel)
    except InstallError as error:
        return Result(suite.name, reason=f"not installed: {error}")
    known = {"python": sys.version.split()[0], **versions(folder, ("torch", *suite.packages[:1]))}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            place = checkout(suite, Path(scratch))
            job = Job(suite, folder / "bin" / "python", place, Path(scratch), agent)
            return _compared(job, known)
    except subprocess.TimeoutExpired:
        return Result(suite.name, known, f"did not end within {TIMEOUT_SECONDS} s")
    except SuiteError as error:
        return Result(suite.name, known, str(error))


def checkout(suite: Suite, scratch: Path) -> Path:
    """Return a clone of a suite's release. Raise SuiteError if it cannot be cloned."""
    if suite is CPYTHON:
        write_tests(scratch)
        return scratch
    folder = CHECKOUTS / f"{suite.repository.rpartition('/')[2]}-{suite.tag}"
    if not folder.exists():
        new = folder.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        words = ("--quiet", "--depth=1", "--config=advice.detachedHead=false")
        source = ("--branch", suite.tag, f"{GITHUB}/{suite.repository}", str(new))
        done = subprocess.run(
            ["git", "clone", *words, *source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SuiteError(f"not cloned: {done.stderr.strip().splitlines()[-1]}")
        new.rename(folder)
    return folder


def _compared(job: Job, known: dict[str, str]) -> Result:
    first = {way: job.run(way) for way in WAYS}
    differing = differences(first)
    second = {way: job.run(way) for way in WAYS} if differing else first
    shown = {name: _shown(name, first, second) for name in differing}
    changed = [name for name in differing if is_changed(name, first, second)]
    return Result(
        job.suite.name,
        known,
        outcomes={way: dict(sorted(Counter(run.values()).items())) for way, run in first.items()},
        changed=[shown[name] for name in changed],
        unstable=[shown[name] for name in differing if name not in changed],
    )


def _shown(name: str, *runs: Mapping[str, Outcomes]) -> str:
    outcomes = (" ".join(run[way].get(name, "absent") for way in WAYS) for run in runs)
    return f"{name}: {'; '.join(outcomes)}"


def lines(result: Result) -> Iterator[str]:
    """Yield what the runs of a suite show."""
    if result.reason:
        yield f"{result.name}: {result.reason}"
        return
    plain = ", ".join(f"{number} {outcome}" for outcome, number in result.outcomes[PLAIN].items())
    yield f"{result.name}: {plain}; {len(result.changed)} changed"
    yield from (f"  changed {each}" for each in result.changed)
    yield from (f"  unstable {each}" for each in result.unstable)


def main() -> None:
    """Run the suites that have no result yet, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only suites whose name contains this")
    parser.add_argument("--agent", choices=AGENTS, default="", help="run each way below this agent")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--write", action="store_true", help="publish all results")
    arguments = parser.parse_args()
    kept = state(arguments.agent)
    results, wheel = load(kept), built_wheel()
    chosen = [suite for suite in ALL if arguments.only.lower() in suite.name.lower()]
    for suite in chosen:
        if arguments.again or suite.name not in results:
            results[suite.name] = tried(suite, wheel, arguments.agent)
            save(kept, results)
        print(*lines(results[suite.name]), sep="\n", flush=True)
    if arguments.write:
        save(PUBLISHED, results)
    if any(results[each.name].changed for each in chosen):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
