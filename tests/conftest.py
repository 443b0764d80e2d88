"""Fixtures, hypothesis settings and skips for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
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
    """A run directory for all users of the machine, with the group of the exporter (61009)."""
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
    """Skip tests whose programs are not installed, with the command that installs them."""
    needs = {
        "stack": (
            ("prometheus", "promtool", "prometheus-alertmanager", "amtool"),
            "run apt-get install prometheus prometheus-alertmanager",
        )
    }
    for marker, (programs, remedy) in needs.items():
        missing = [program for program in programs if not shutil.which(program)]
        if missing:
            skip = pytest.mark.skip(reason=f"{', '.join(missing)} not on PATH; {remedy}")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)
