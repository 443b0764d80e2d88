"""The loggers for experiment trackers, with the real packages and their own files read back."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.samples import full_sample
from support.waiting import until

from torchmem.integrations.memory_log import MemoryLog, scalars
from torchmem.sample.sample import DeviceSample, Sample
from torchmem.sdk import Session
from torchmem.simulator.backend import SimulatedBackend

GIB = 1 << 30
Run = Callable[..., subprocess.CompletedProcess[str]]
Opener = Callable[..., Session]


def test_the_scalars_of_a_rank() -> None:
    """They are named after the metrics, and have the number of a rank of several."""
    assert scalars(full_sample()) == {
        "torchmem/rank0/allocated_bytes": 40 * GIB + (1 << 20),
        "torchmem/rank0/allocated_peak_bytes": 50 * GIB,
        "torchmem/rank0/reserved_bytes": 60 * GIB + (2 << 20),
        "torchmem/rank0/free_bytes/stranded": 12 * GIB,
        "torchmem/rank0/free_bytes/releasable": 7 * GIB,
        "torchmem/rank0/fragmentation_ratio": 1 - 2 / 19,
        "torchmem/rank0/headroom_bytes/without_flush": 2 * GIB,
        "torchmem/rank0/headroom_bytes/with_flush": 9 * GIB,
        "torchmem/rank0/component_bytes/parameters": 8 * GIB,
        "torchmem/rank0/component_bytes/gradients": 8 * GIB,
        "torchmem/rank0/component_bytes/optimizer_state": 16 * GIB,
        "torchmem/rank0/component_bytes/kv_cache": 2 * GIB,
        "torchmem/rank0/component_bytes/held": 5 * GIB + (1 << 20),
        "torchmem/rank0/component_bytes/pending": GIB,
        "torchmem/rank0/component_bytes/rounding": GIB,
        "torchmem/rank0/alloc_retries_total": 3,
        "torchmem/rank0/ooms_total": 1,
    }


def test_what_is_unknown_is_not_logged() -> None:
    """A device of which only the total is known has no scalar; two devices have their numbers."""
    sample = full_sample()
    alone = replace(sample, process=replace(sample.process, world_size=None))
    (device,) = sample.devices
    bare = DeviceSample(1, device.uuid, device.name, device.total_bytes)

    assert scalars(replace(alone, devices=(bare,))) == {}
    names = scalars(replace(alone, devices=(device, bare)))
    assert {name.split("/")[1] for name in names} == {"gpu0"}


def test_each_sample_is_logged_once_and_the_last_at_the_end(
    open_session: Opener, backend: SimulatedBackend
) -> None:
    """The session's last state is logged before its end; one that was logged is not repeated."""
    session, written = open_session(backend, interval=0.01), list[Sample]()
    MemoryLog(session, lambda _, sample: written.append(sample), 0.001)
    backend.step()
    until(lambda: written)
    backend.step()
    session.close()
    until(lambda: written[-1].ended)  # `close` waits half a second at most

    times = [sample.timestamp for sample in written]
    assert len(times) == len(set(times))
    assert (written[-1].steps.count, written[-1].ended) == (2, "exited")


def test_a_tracker_that_fails_is_counted(open_session: Opener, backend: SimulatedBackend) -> None:
    """An exception of the tracker reaches neither the training nor the end of the session."""

    def write(_: dict[str, float], __: Sample) -> None:
        raise ConnectionError("away")

    session = open_session(backend, interval=0.01)
    MemoryLog(session, write, 0.001)
    backend.step()
    until(lambda: session.errors.counts["tracker"])
    session.close()


def test_a_tracker_that_hangs_does_not_keep_the_process(run_script: Run) -> None:
    """A process ends while the tracker still waits for an answer, with its own exit code."""
    done = run_script("""
from torchmem.integrations.memory_log import MemoryLog
asked, never = threading.Event(), threading.Event()
def write(scalars, sample): asked.set(); never.wait()
session = sdk.instrument(backend=backend)
MemoryLog(session, write, 0.01)
backend.step()
asked.wait()
sys.exit(7)
""")

    assert (done.returncode, done.stderr) == (7, "")


TRAINING = """
session = sdk.instrument(backend=backend)
allocator.malloc(30 << 20)
for _ in range(3): backend.step()
"""


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs pip install mlflow-skinny")
def test_mlflow(run_script: Run, tmp_path: Path) -> None:
    """The active run gets the scalars at the step, and a process without a run logs a warning."""
    store = tmp_path / "mlruns"
    environment = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": store.as_uri()}
    done = run_script(
        f"os.environ |= {environment}"
        + TRAINING
        + """
import mlflow
from torchmem.integrations.mlflow import log_memory
assert log_memory() is None
with mlflow.start_run():
    log_memory(every=0.05)
    folder = os.environ["TORCHMEM_RUN_DIR"]
    logged = folder + "/mlruns/*/*/metrics/torchmem/headroom_bytes/with_flush"
    while not any(open(path).read().endswith(" 3\\n") for path in glob.glob(logged)):
        time.sleep(0.05)
"""
    )
    assert done.returncode == 0, done.stderr
    assert "call it after mlflow.start_run()" in done.stderr

    (metric,) = store.rglob("metrics/torchmem/allocated_bytes")
    milliseconds, value, step = metric.read_text().splitlines()[-1].split()[:3]
    assert (float(value), step) == (30 << 20, "3")
    assert int(milliseconds) > 1e12
