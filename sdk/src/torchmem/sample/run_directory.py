"""The run directory: where every process publishes its one file and the exporter finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT_VARIABLE = "TORCHMEM_RUN_DIR"
SYSTEM_RUN_DIR = Path("/run/torchmem")
FALLBACK_RUN_DIR = Path("/tmp/torchmem")  # noqa: S108 - shared on purpose; readers trust nothing in it
RUN_DIR_MODE = 0o1777
SAMPLE_SUFFIX = ".sample.json"
REPORT_SUFFIX = ".oom.json"
MAX_SAMPLE_BYTES = 256 * 1024
MAX_REPORT_BYTES = 64 * 1024


def run_directory(environment: Mapping[str, str], system: Path = SYSTEM_RUN_DIR) -> Path:
    """`TORCHMEM_RUN_DIR`, else /run/torchmem when it exists (the exporter's service made it), else /tmp/torchmem."""
    named = environment.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    return system if system.is_dir() else FALLBACK_RUN_DIR


def sample_name(pid: int, pid_namespace: int | None, start_ticks: int | None) -> str:
    """A file name that no other process of this node can own, across pid namespaces and pid reuse."""
    return f"{pid_namespace or 0}-{pid}-{start_ticks or 0}{SAMPLE_SUFFIX}"


def report_name(sample: str, number: int) -> str:
    """File name of the process's OOM report `number`, from the name of its sample."""
    return f"{sample.removesuffix(SAMPLE_SUFFIX)}-{number}{REPORT_SUFFIX}"
