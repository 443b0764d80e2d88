"""Fixtures, hypothesis settings, skips and the count of skips for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.needs import needs

ROOT = Path(__file__).resolve().parent.parent
# What tests/programs.sh has unpacked. A program of the machine has precedence.
os.environ["PATH"] += f":{ROOT / '.programs' / 'bin'}"
settings.register_profile("torchmem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("torchmem")
# A shell starts background jobs with SIGINT ignored, and nohup those with SIGHUP ignored, which
# every process of a test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Prometheus' programs collect garbage less often, which saves a third of promtool's CPU time.
os.environ.setdefault("GOGC", "400")


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the top folder of the repository."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove TORCHMEM_* variables and those of launchers from the environment."""
    for name in list(os.environ):
        if name.startswith(("TORCHMEM_", "SLURM_", "OMPI_", "PMI_")) or name in {
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
        }:
            monkeypatch.delenv(name)


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """A run directory for all users of the machine, with the group of the exporter (61009).

    It is not below `tmp_path`: whenever pytest starts, it makes its folder private to its user.
    """
    path = Path(tempfile.mkdtemp(prefix="torchmem-test-", dir="/tmp"))
    if os.geteuid() == 0:
        os.chown(path, 0, 61009)
    path.chmod(0o3777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def restless() -> Iterator[None]:
    """Make Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of the real Prometheus and Alertmanager where they are missing."""
    stack = needs("prometheus", "promtool", "prometheus-alertmanager", "amtool")
    for item in items:
        if item.get_closest_marker("stack"):
            item.add_marker(stack)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by their reasons, which say what lets them run."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"{reasons.total()} skipped, and what lets them run")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")
