"""Training on PyTorch's real CUDA allocator, with a phantom GPU and the real exporter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.phantom import run_on_phantom
from support.stack import answers, free_port, prometheus, running
from support.training import Training
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory
from torchmem.phantom.torch_build import find_torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PRELUDE = """
import glob, json, os, sys, time, torch
from torchmem import sdk

def published():
    paths = glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/*.sample.json")
    return [json.load(open(path)) for path in paths]
"""
PHANTOM = [sys.executable, "-m", "torchmem.phantom"]


WAITS_LONGEST = "test_truth.py"
"""Its tests wait for most of their time. At the end of the run they would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the file that waits longest first, while other tests use the processors."""
    items.sort(key=lambda item: item.path.name != WAITS_LONGEST)


def _missing() -> str | None:
    torch = find_torch(sys.executable, os.environ)
    if torch is None:
        return "PyTorch is not installed; run make test-allocator"
    return None if torch.cuda else "this is not the CUDA build of PyTorch; run make test-allocator"


@pytest.fixture(autouse=True, scope="session")
def _cuda_build() -> None:
    """Skip the tier if PyTorch has no CUDA allocator."""
    reason = _missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts exporter, Prometheus, and a script on a GPU of the given memory."""
    with ExitStack() as stack:

        def start(memory: str, every: int, *script: str, alloc_conf: str = "") -> Training:
            settings = {
                "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
                "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
                "TORCHMEM_INTERVAL": "0.005",
                "TORCHMEM_SNAPSHOT_INTERVAL": "0.01",
                "TORCHMEM_SNAPSHOT_BUDGET": "1",
                "TORCHMEM_IDLE_AFTER": "0.05",
            }
            environment = os.environ | settings
            phantom = [*PHANTOM, "--memory", memory, "--"]
            address = f"127.0.0.1:{free_port()}"
            exporter = [sys.executable, "-m", "torchmem.cli", "exporter", "--listen", address]
            exporter += ["--all-series"]
            stack.enter_context(
                running([*phantom, *exporter], tmp_path / "exporter.log", environment)
            )
            until(lambda: answers(f"http://{address}/-/healthy"))
            watching = stack.enter_context(prometheus(tmp_path, address))
            checked = [
                sys.executable,
                str(HERE / "checkpoint.py"),
                str(tmp_path),
                str(every),
                *script,
            ]
            environment = environment | (
                {"PYTORCH_CUDA_ALLOC_CONF": alloc_conf} if alloc_conf else {}
            )
            process = running([*phantom, *checked], tmp_path / "training.log", environment)
            return Training(stack.enter_context(process), watching, tmp_path)

        yield start


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """GPUs and a run directory that belong to this test."""
    own = {
        "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
        "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
    }
    return os.environ | own | {"TORCHMEM_INTERVAL": "0.02"}


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a script on two phantom GPUs of 4 GiB."""

    def run_one(body: str) -> subprocess.CompletedProcess[str]:
        return run_on_phantom(
            "-c", PRELUDE + body, memory="4GiB", devices=2, environment=environment
        )

    return run_one


@pytest.fixture
def series(environment: dict[str, str]) -> Callable[[str], list[tuple[dict[str, str], float]]]:
    """Returns labels and values of one metric, from the exporter after the script has ended."""

    def read(name: str) -> list[tuple[dict[str, str], float]]:
        directory = RunDirectory(Path(environment["TORCHMEM_RUN_DIR"]), all_series=True)
        with closing(Exporter(FakeNvml.of(), directory, all_series=True)) as exporter:
            shown = generate_latest(exporter).decode()
        samples = [
            sample for family in text_string_to_metric_families(shown) for sample in family.samples
        ]
        return [(sample.labels, sample.value) for sample in samples if sample.name == name]

    return read
