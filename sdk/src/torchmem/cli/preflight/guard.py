"""A phantom never by accident: where a real GPU is, or where one phantom already is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmem.core.errors import UsageError
from torchmem.phantom.build import LIBRARY


def check_machine(environment: Mapping[str, str], *, beside_gpu: bool, root: Path = Path("/")) -> None:
    """Raise UsageError where a preflight should not run. `root`: of the file system that is looked at."""
    if LIBRARY in environment.get("LD_PRELOAD", ""):
        raise UsageError("this shell runs on a phantom GPU already: start torchmem preflight outside of it.")
    if not beside_gpu and has_gpu(root):
        raise UsageError(
            "this machine has a real NVIDIA GPU: run the script on it, or add --beside-gpu for a phantom that leaves "
            "it alone."
        )


def has_gpu(root: Path) -> bool:
    """Whether NVIDIA's driver shows a card here; no call of the driver is made."""
    found = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]
    return bool(found)
