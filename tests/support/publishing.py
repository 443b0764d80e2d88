"""Sample files in a run directory, written without the SDK."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.samples import UUID, full_sample

from torchmem.host.procfs import own_start_ticks, pid_namespace
from torchmem.sample.run_directory import SAMPLE_SUFFIX, sample_name
from torchmem.sample.sample import Process, Sample, encode


def own_process(**changes: Any) -> Process:
    """Return the process that runs the tests, as rank 0."""
    process = replace(
        full_sample().process,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        start_ticks=own_start_ticks(),
    )
    return replace(process, **changes)


def own_sample(uuid: str = UUID, process: Process | None = None, **changes: Any) -> Sample:
    """Return the sample that the process running the tests would publish now."""
    sample = replace(
        full_sample(uuid=uuid), process=process or own_process(), timestamp=time.time()
    )
    return replace(sample, **changes)


def user_directory(run_dir: Path) -> Path:
    """Return the directory of the user who runs the tests, and create it."""
    directory = run_dir / str(os.geteuid())
    directory.mkdir(0o755, parents=True, exist_ok=True)
    return directory


def publish(run_dir: Path, content: Sample | bytes, name: str | None = None) -> Path:
    """Replace one file of this user atomically and return its path."""
    if isinstance(content, Sample):
        process = content.process
        name = name or sample_name(process.pid, process.pid_namespace, process.start_ticks)
        content = encode(content)
    return replace_file(user_directory(run_dir) / (name or f"some{SAMPLE_SUFFIX}"), content)


def replace_file(path: Path, content: bytes) -> Path:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    return temporary.replace(path)
