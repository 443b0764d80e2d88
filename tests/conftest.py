"""Fixtures and hypothesis settings shared by all tests."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
settings.register_profile("torchmem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("torchmem")
# A script's shell lets what it starts with & ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """Top folder of the repository."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own TORCHMEM_* variables and launcher must not change a test."""
    for name in list(os.environ):
        if name.startswith(("TORCHMEM_", "SLURM_", "OMPI_", "PMI_")) or name in {
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
        }:
            monkeypatch.delenv(name)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say how it could."""
    needs = {
        "stack": (
            ("prometheus", "promtool", "prometheus-alertmanager", "amtool"),
            "install Prometheus and Alertmanager: apt-get install prometheus prometheus-alertmanager",
        )
    }
    for item in items:
        for marker, (programs, remedy) in needs.items():
            missing = [program for program in programs if not shutil.which(program)]
            if item.get_closest_marker(marker) and missing:
                item.add_marker(
                    pytest.mark.skip(reason=f"{', '.join(missing)} not on PATH; {remedy}")
                )
