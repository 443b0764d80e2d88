"""Sessions over a simulated GPU, and processes that run a script with the SDK."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

MIB = 1 << 20
UUID = "GPU-00000000-0000-4000-8000-000000000001"


@pytest.fixture
def allocator() -> DeviceCachingAllocator:
    """A simulated allocator on an empty GPU of 1 GiB."""
    return DeviceCachingAllocator(
        SimulatedGpu(1024 * MIB, context_bytes=0, uuid=UUID, name="Small")
    )


@pytest.fixture
def backend(allocator: DeviceCachingAllocator) -> SimulatedBackend:
    """The backend of that allocator, with CUDA already up."""
    return SimulatedBackend([allocator])


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Opens sessions that publish into `tmp_path`, and closes them at the end."""
    opened: list[Session] = []

    def open_one(
        backend: Any, environment: dict[str, str] | None = None, **settings: Any
    ) -> Session:
        settings = {"run_dir": tmp_path, "interval": 3600.0, **settings}
        opened.append(Session(resolve(settings, {}), backend, environment or {}))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()


@pytest.fixture
def published(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Reads all sample files of the run directory."""
    return lambda: [
        json.loads(path.read_bytes()) for path in sorted(tmp_path.rglob(f"*{SAMPLE_SUFFIX}"))
    ]


# Since Python 3.12, os.fork warns where a process has other threads, as each process with CUDA has.
PRELUDE = """
import glob, json, os, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from torchmem import sdk
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.errors import OutOfMemoryError

def published():
    paths = glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/*.sample.json")
    return [json.load(open(path)) for path in paths]

def wait_for_step(count):
    while not any(sample["steps"]["count"] == count for sample in published()):
        time.sleep(0.01)

allocator = DeviceCachingAllocator(SimulatedGpu(1 << 30, context_bytes=0, uuid="GPU-1"))
backend = SimulatedBackend([allocator])
"""


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script over a simulated GPU in a process of its own, publishing into `tmp_path`."""

    def run(body: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "TORCHMEM_RUN_DIR": str(tmp_path),
            "TORCHMEM_INTERVAL": "0.05",
        }
        return subprocess.run(
            [sys.executable, "-c", PRELUDE + body],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,  # a read that is slow on a busy machine delays the next by 15 s
            check=False,
        )

    return run
