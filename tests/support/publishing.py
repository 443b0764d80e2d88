"""Sample files in a run directory, written without the SDK."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.samples import UUID, full_sample

from torchmem.sample.procfs import own_start_ticks, pid_namespace
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


def publish(directory: Path, content: Sample | bytes, name: str | None = None) -> Path:
    """Replace one file atomically and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Sample):
        process = content.process
        name = name or sample_name(process.pid, process.pid_namespace, process.start_ticks)
        content = encode(content)
    path = directory / (name or f"some{SAMPLE_SUFFIX}")
    temporary = directory / f".{path.name}.tmp"
    temporary.write_bytes(content)
    temporary.replace(path)
    return path
