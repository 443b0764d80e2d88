"""An exporter over a temporary run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import Nvml
from torchmem.exporter.sample_files import RunDirectory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def open_exporter(run_dir: Path) -> Iterator[Callable[..., Exporter]]:
    """A function that opens an exporter of `run_dir`, by default on a node without GPUs.

    It waits for the driver as long as a busy machine needs.
    """
    opened: list[Exporter] = []

    def open_one(
        nvml: Nvml | None = None, directory: RunDirectory | None = None, **settings: Any
    ) -> Exporter:
        settings = {"deadline_seconds": 120, **settings}
        opened.append(
            Exporter(nvml or FakeNvml.of(), directory or RunDirectory(run_dir), **settings)
        )
        return opened[-1]

    yield open_one
    for exporter in opened:
        exporter.close()
