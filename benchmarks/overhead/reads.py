"""CPU time of one read, one publication, and one snapshot.

Usage: `python -m benchmarks.overhead.reads 2000`. Measures one number of blocks per process; prints
one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.overhead.workload import make

from torchmem.sample.sample import Sample
from torchmem.sdk.identity import identify
from torchmem.sdk.publish.sample_file import SampleFile
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve

REPEATS = 7
SECONDS_PER_REPEAT = 0.1


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread for one call: the median of several means."""
    call()
    started = time.thread_time()
    call()
    calls = max(1, int(SECONDS_PER_REPEAT / max(time.thread_time() - started, 1e-7)))
    return statistics.median(_mean(call, calls) for _ in range(REPEATS))


def _mean(call: Callable[[], object], calls: int) -> float:
    started = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - started) / calls


def snapshot(recorder: Recorder) -> None:
    """Take and measure one snapshot."""
    recorder.take_snapshot()
    recorder.measure_snapshot()


def measure(blocks: int) -> dict[str, object]:
    """Return one row of the table."""
    workload = make(blocks)
    recorder = Recorder(workload.backend)
    recorder.read_settings()
    recorder.read_stats()
    snapshot(recorder)
    settings = resolve({"interval": 3600.0}, {})
    process = identify(settings, os.environ, workload.backend.versions())
    file = SampleFile(Path(tempfile.mkdtemp(prefix="torchmem-benchmark-")), "1.sample.json")

    def sample() -> Sample:
        return Sample(
            time.time(), process, recorder.samples(), allocator_settings=recorder.settings
        )

    file.write(sample())
    session = Session(
        resolve({"interval": 3600.0, "run_dir": file.path.parent}, {}), workload.backend, {}
    )
    session.step()
    row = {
        "where": workload.where,
        "blocks": workload.blocks,
        "step": cpu_seconds(session.step),
        "stats": cpu_seconds(recorder.read_stats),
        "publication": cpu_seconds(lambda: file.write(sample())),
        "no_news": cpu_seconds(lambda: file.refresh(sample())),
        "snapshot_read": cpu_seconds(workload.backend.memory_snapshot),
        "snapshot": cpu_seconds(lambda: snapshot(recorder)),
    }
    session.close()
    return row


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
