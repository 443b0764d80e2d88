"""Fixtures of the phantom's tests, which need a C compiler but no PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.needs import compiler

from torchmem.phantom.build import library_folder
from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.gpus import GpuModel, parse_gpu_model

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with its own cache, in which the library is built once."""
    compiler()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    library_folder(None, environment)
    return environment


@pytest.fixture
def on_gpu(cache: dict[str, str], tmp_path: Path) -> Run:
    """Return a function that runs Python code with `cuda` (ctypes) on its own GPUs."""
    prelude = "import ctypes; from ctypes import byref; cuda = ctypes.CDLL(None)\n"

    def run(
        code: str, of: GpuModel | None = None, devices: int = 1, addresses: str = ""
    ) -> subprocess.CompletedProcess[str]:
        environment = phantom_environment(
            of or parse_gpu_model("24GB"), devices, tmp_path / "state", cache
        )
        environment["PHANTOM_ADDRESSES"] = addresses
        command = [sys.executable, "-c", prelude + code]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run
