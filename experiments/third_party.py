"""Run the test suites of other projects with and without torchmem, and compare each outcome:

    python -m experiments.third_party --suite joblib --checkout CHECKOUT --python PYTHON
    python -m experiments.third_party --suite cpython --python PYTHON    # its own tests

PYTHON is from an environment with torchmem, installed from its wheel, and what the suite needs.
The tests run plain, with TORCHMEM=1, and under `torchmem run`. Files with a test whose outcomes
differ run again in each way. A test is changed if both of its outcomes with torchmem differ from
both of its plain ones in one of the ways, and unstable otherwise; the exit code is 1 if a test is
changed. Suites that use CUDA run on phantom GPUs, and none of them reaches the network.

With `--agent newrelic` the tests run below that agent in each way, so that the plain outcomes are
those of the agent alone. It is in the environment of PYTHON, and sends nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from experiments.monitored_runs import PLAIN, RUN, VARIABLE, WAYS

TIMEOUT_SECONDS = 3600
# Names of tests by their outcome, from a file in JUnit's format.
Outcomes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of a project: paths in its checkout, and how pytest runs them.

    `gpus` is the number of phantom GPUs; with none, the tests run without a GPU.
    """

    paths: tuple[str, ...]
    gpus: int = 0


# Subsets that take a minute or two of CPU time: launchers, hooks, memory, training, processes.
SUITES = {
    "accelerate": Suite(
        (
            "tests/test_accelerator.py",
            "tests/test_hooks.py",
            "tests/test_imports.py",
            "tests/test_memory_utils.py",
            "tests/test_optimizer.py",
            "tests/test_scheduler.py",
        ),
        gpus=1,
    ),
    "pytorch-memlab": Suite(("test",), gpus=1),
    "pytorch-ignite": Suite(
        (
            "tests/ignite/engine/test_create_supervised.py",
            "tests/ignite/engine/test_engine.py",
            "tests/ignite/engine/test_memory_leaks.py",
            "tests/ignite/distributed/test_auto.py",
            "tests/ignite/handlers/test_checkpoint.py",
        ),
        gpus=1,
    ),
    "peft": Suite(
        (
            "tests/test_bufferdict.py",
            "tests/test_incremental_pca.py",
            "tests/test_trainable_tokens.py",
        ),
        gpus=1,
    ),
    "joblib": Suite(
        (
            "joblib/test/test_memmapping.py",
            "joblib/test/test_module.py",
            "joblib/test/test_missing_multiprocessing.py",
            "joblib/test/test_cloudpickle_wrapper.py",
        ),
    ),
    "loky": Suite(
        (
            "tests/test_loky_backend.py",
            "tests/test_loky_module.py",
            "tests/test_resource_tracker.py",
        ),
    ),
}
CPYTHON = "cpython"
CPYTHON_TESTS = (
    "test.test_import",
    "test.test_importlib",
    "test.test_site",
    "test.test_zipimport",
    "test.test_pkgutil",
    "test.test_runpy",
    "test.test_cmd_line",
    "test.test_multiprocessing_main_handling",
    "test.test_subprocess",
    "test.test_signal",
    "test.test_threading",
    "test.test_faulthandler",
)
# Some releases install only the common part of test_multiprocessing_fork and its like. Of it, the
# tests of how processes start and end; with all others they take half an hour in each way.
MULTIPROCESSING = """
from test import _test_multiprocessing
_test_multiprocessing.install_tests_in_module_dict(globals(), "{method}")
kept = ("TestProcess", "StartMethod", "Fork", "Subclassing", "Tracker", "CloseFds", "SysArgv")
for name, value in [*globals().items()]:
    if isinstance(value, type) and not any(word in name for word in kept):
        del globals()[name]
"""
METHODS = ("fork", "spawn", "forkserver")
# The commands of other agents, which change how Python starts, as `torchmem run` does.
AGENTS = {
    "newrelic": ("newrelic-admin", "run-program"),
    "ddtrace": ("ddtrace-run",),
    "opentelemetry": ("opentelemetry-instrument",),
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


def main() -> None:
    """Run a suite in each way; print the numbers of outcomes, and each test that differs."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        checkout = arguments.checkout.absolute()
        job = Job(arguments.python, arguments.suite, checkout, Path(folder), arguments.agent)
        first = {way: job.run(way, arguments.tests) for way in WAYS}
        print_table(first)
        differing = differences(first)
        files = job.files(differing, arguments.tests)
        second = {way: job.run(way, files) for way in WAYS} if differing else first
    changed = [name for name in differing if is_changed(name, first, second)]
    for name in differing:
        found = [[run[way].get(name, "absent") for way in WAYS] for run in (first, second)]
        print("CHANGED " if name in changed else "unstable", name, *found)
    sys.exit(1 if changed else 0)


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--suite", choices=[*SUITES, CPYTHON], required=True)
    add("--checkout", type=Path, default=Path(), help="checkout of the project")
    add("--python", default=sys.executable, help="Python of the environment with torchmem")
    add("--agent", choices=[*AGENTS], help="run each way below this agent")
    add("--tests", nargs="*", default=[], help="these tests instead of those of the suite")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Job:
    """A suite in one environment, with a folder for its files."""

    python: str
    suite: str
    checkout: Path
    folder: Path
    agent: str | None = None

    def run(self, way: str, tests: list[str]) -> Outcomes:
        """Return the outcomes of these tests, or of all tests of the suite, in one way."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [*self._prefix(way), self.python, *self._arguments(report, tests)],
            cwd=self.folder if self.suite == CPYTHON else self.checkout,
            env=environment(way, self.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if not report.exists():
            output = done.stdout.decode(errors="replace")[-4000:]
            sys.exit(f"{way}: no report, exit code {done.returncode}:\n{output}")
        return read_outcomes(report)

    def _prefix(self, way: str) -> list[str]:
        hook = [self.python, "-m", "torchmem.cli", "run", "--"] if way == RUN else []
        if self.agent is None:
            return hook
        program, *words = AGENTS[self.agent]
        return [*hook, str(Path(self.python).with_name(program)), *words]

    def files(self, names: Iterable[str], tests: list[str]) -> list[str]:
        """Return those of the tests that run that contain the tests with these names."""
        run = tests or [*self._all_tests()]
        return [test for test in run if any(Path(test).stem in name for name in names)] or run

    def _all_tests(self) -> Iterable[str]:
        if self.suite == CPYTHON:
            return (*CPYTHON_TESTS, *(f"test_of_{method}" for method in METHODS))
        return SUITES[self.suite].paths

    def _arguments(self, report: Path, tests: list[str]) -> list[str]:
        names = tests or [*self._all_tests()]
        if self.suite == CPYTHON:
            return ["-m", "test", "--testdir", self._cpython(), f"--junit-xml={report}", *names]
        gpus = str(SUITES[self.suite].gpus)
        phantom = ["-m", "torchmem.phantom", "--gpus", gpus, "--", self.python]
        return [
            *(phantom if gpus != "0" else []),
            *("-m", "pytest", "--override-ini=addopts=", "--timeout=300"),
            f"--junit-xml={report}",
            *names,
        ]

    def _cpython(self) -> str:
        for method in METHODS:
            path = self.folder / f"test_of_{method}.py"
            path.write_text(MULTIPROCESSING.format(method=method))
        return str(self.folder)


def environment(way: str, folder: Path) -> dict[str, str]:
    """Return the environment of a way; no test reaches the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHMEM")}
    switch = {"TORCHMEM": "1"} if way == VARIABLE else {}
    run_dir = folder / "run"
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
    """Return passed, failed, error or skipped by test; a test that ran twice has both."""
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own subprocess wrote it
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcome = _outcome(case)
        outcomes[name] = f"{outcomes[name]}+{outcome}" if name in outcomes else outcome
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


def print_table(outcomes: Mapping[str, Outcomes]) -> None:
    """Print the numbers of tests by outcome in each way."""
    for way, found in outcomes.items():
        print(f"{way:<14}", dict(sorted(Counter(found.values()).items())), flush=True)


if __name__ == "__main__":
    main()
