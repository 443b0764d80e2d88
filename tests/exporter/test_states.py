"""The state of a process, from its sample and from /proc."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.exposition import scrape
from support.publishing import own_process, own_sample, publish
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory
from torchmem.host.process_table import (
    INITIAL_PID_NAMESPACE,
    ProcessStatus,
    ProcessTable,
    process_state,
)
from torchmem.host.procfs import start_ticks
from torchmem.sample.sample import Ending, Process, State

OpenExporter = Callable[..., Exporter]
CONTAINER = 4026532999


@contextmanager
def child() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    """Start a process and yield it with the identity that it would publish."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as popen:
        try:
            ticks = until(lambda: start_ticks(popen.pid))
            yield popen, own_process(pid=popen.pid, start_ticks=ticks)
        finally:
            popen.kill()


def states(directory: RunDirectory, now: float | None = None) -> list[State]:
    """Return the states of everything that is exported."""
    return [item.state for item in directory.read(time.time() if now is None else now)]


@pytest.mark.parametrize(
    ("alive", "ended", "oom_pending", "age", "expected"),
    [
        (True, None, False, 0, "running"),
        (True, None, True, 0, "running"),
        (True, None, False, 9999, "running"),
        (True, "exited", False, 0, "exited"),
        (False, "failed", False, 0, "failed"),
        (False, "exited", False, 0, "exited"),
        (False, "oom", True, 0, "oom"),
        (False, None, True, 0, "oom"),
        (False, None, False, 0, "killed"),
        (None, None, False, 59, "running"),
        (None, None, False, 61, "killed"),
        (None, None, True, 61, "oom"),
        (None, "exited", False, 1, "exited"),
    ],
)
def test_state_of_a_process(
    alive: bool | None, ended: Ending | None, oom_pending: bool, age: float, expected: State
) -> None:
    """Its own ending counts first, then liveness or its file's age if hidden, then an OOM."""
    sample = own_sample(ended=ended, oom_pending=oom_pending)

    assert process_state(sample, ProcessStatus(alive, 1), sample.timestamp + age, age) == expected


@pytest.mark.parametrize(
    ("last_step", "stall_after", "expected"),
    [
        (100.0, 300.0, "running"),
        (301.0, 300.0, "stalled"),
        (301.0, None, "running"),
        (None, 300.0, "running"),
    ],
)
def test_live_process_without_steps_has_stalled(
    last_step: float | None, stall_after: float | None, expected: State
) -> None:
    """A process has stalled if it finished steps, but none for longer than it allows."""
    sample = own_sample()
    then = None if last_step is None else sample.timestamp - last_step
    stepped = replace(
        sample, steps=replace(sample.steps, last_timestamp=then), stall_after_seconds=stall_after
    )

    assert process_state(stepped, ProcessStatus(alive=True, pid=1), sample.timestamp, 0) == expected
    assert (
        process_state(stepped, ProcessStatus(alive=False, pid=1), sample.timestamp, 0) == "killed"
    )


@pytest.mark.parametrize(("oom_pending", "expected"), [(False, "killed"), (True, "oom")])
def test_sigkilled_process_keeps_its_last_values(
    open_exporter: OpenExporter, run_dir: Path, oom_pending: bool, expected: State
) -> None:
    """After SIGKILL the last values of the rank stay, with the state that explains its end."""
    exporter = open_exporter()
    with child() as (popen, process):
        publish(run_dir, own_sample(process=process, oom_pending=oom_pending))
        before = scrape(exporter)
        popen.send_signal(signal.SIGKILL)
        popen.wait()
        after = scrape(exporter)

    assert before.value("torchmem_process_state", state="running") == 1.0
    assert after.value("torchmem_process_state", state=expected) == 1.0
    assert after.value("torchmem_process_state", state="running") == 0.0
    assert before.series["torchmem_reserved_bytes"] == after.series["torchmem_reserved_bytes"]


def test_zombie_has_ended(run_dir: Path) -> None:
    """A zombie, which its launcher has not waited for yet, has ended."""
    with child() as (popen, process):
        publish(run_dir, own_sample(process=process))
        popen.send_signal(signal.SIGKILL)

        assert until(lambda: states(RunDirectory(run_dir)) == ["killed"] and ["killed"]) == [
            "killed"
        ]


def test_reused_pid_is_another_process(run_dir: Path) -> None:
    """A process with the same pid and another start time is not the rank."""
    publish(run_dir, own_sample(process=own_process(start_ticks=1)))

    assert states(RunDirectory(run_dir)) == ["killed"]


def test_exporter_before_and_after_training(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A missing directory is not an error, and a rank appears when it has written its file."""
    early = open_exporter()
    empty = scrape(early)
    publish(run_dir, own_sample())

    assert empty.value("torchmem_exporter_collector_success", collector="samples") == 1.0
    assert empty.matching("torchmem_process_state") == {}
    assert scrape(early).value("torchmem_process_state", state="running") == 1.0
    assert (
        scrape(early).series["torchmem_alloc_retries_total"]
        == (scrape(open_exporter()).series["torchmem_alloc_retries_total"])
    )


def test_unreadable_directory_fails_only_its_collector(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """A run directory that cannot be read fails one collector, not the scrape."""
    run_dir.write_text("not a directory")

    metrics = scrape(open_exporter())

    assert metrics.value("torchmem_exporter_collector_success", collector="samples") == 0.0
    assert metrics.value("nvml_up") == 1.0


def test_final_values_expire(run_dir: Path) -> None:
    """A process that ended is exported for the time to live; its file is its owner's to remove."""
    path = publish(run_dir, own_sample(ended="exited"))
    directory, written = RunDirectory(run_dir, ttl_seconds=900), path.stat().st_mtime

    assert states(directory, written + 899) == ["exited"]
    assert states(directory, written + 901) == []
    assert path.exists()


def test_time_to_live_of_a_silent_process_starts_when_it_is_killed(run_dir: Path) -> None:
    """A rank that was silent for an hour before it was killed is still exported as killed."""
    with child() as (popen, process):
        path = publish(run_dir, own_sample(process=process))
        directory, written = RunDirectory(run_dir, ttl_seconds=900), path.stat().st_mtime
        assert states(directory, written + 3600) == ["running"]
        popen.kill()
        popen.wait()

        assert states(directory, written + 3700) == ["killed"]
        assert states(directory, written + 3600 + 901) == []


def test_live_process_never_expires(run_dir: Path) -> None:
    """A silent process stays; the sample's timestamp shows the age of its values."""
    path = publish(run_dir, own_sample())

    assert states(RunDirectory(run_dir, ttl_seconds=900), path.stat().st_mtime + 10**6) == [
        "running"
    ]


def fake_proc(root: Path, own: int, processes: Mapping[int, tuple[int, int, int]]) -> Path:
    """Create a /proc for an exporter in the namespace `own`.

    `processes` maps host pids to namespace, pid in it and start ticks.
    """
    for pid, (namespace, inner, ticks) in [("self", (own, 1, 1)), *processes.items()]:
        entry = root / str(pid)
        (entry / "ns").mkdir(parents=True)
        (entry / "ns" / "pid").symlink_to(f"pid:[{namespace}]")
        (entry / "stat").write_text(f"{pid} (python) S " + "0 " * 18 + f"{ticks} 0\n")
        nested = f"{pid}" if namespace == own else f"{pid}\t{inner}"
        (entry / "status").write_text(f"Name:\tpython\nNSpid:\t{nested}\n")
    return root


CONTAINER_SCRIPT = """
import sys, time
from pathlib import Path
from support.publishing import own_sample, publish
publish(Path(sys.argv[1]), own_sample())
time.sleep(600)
"""


def may_unshare() -> bool:
    """Return whether this user may create a pid namespace."""
    return (
        subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
        ).returncode
        == 0
    )


@pytest.mark.skipif(
    not shutil.which("unshare") or not may_unshare(), reason="creating a pid namespace needs root"
)
def test_real_pid_namespace(root: Path, run_dir: Path) -> None:
    """A rank with pid 1 in its namespace is exported with its host pid, alive and killed."""
    script = [sys.executable, "-c", CONTAINER_SCRIPT, str(run_dir)]
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *script]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root / "tests")}) as popen:
        directory = RunDirectory(run_dir)
        alive = until(lambda: directory.read(time.time()))[0]
        popen.kill()
        popen.wait()
        dead = until(
            lambda: [item for item in directory.read(time.time()) if item.state == "killed"]
        )[0]

    assert (alive.sample.process.pid, alive.state, alive.attributed) == (1, "running", True)
    assert alive.pid not in {1, popen.pid}
    assert alive.pid == dead.pid


CONTAINED = own_process(pid=7, pid_namespace=CONTAINER, start_ticks=555)


def test_process_in_a_container_is_found_by_its_host_pid(tmp_path: Path) -> None:
    """On the host, a rank with pid 7 in its container is exported with its host pid."""
    everyone = {
        31000: (CONTAINER, 7, 555),
        32000: (CONTAINER + 1, 7, 555),
        33000: (CONTAINER, 8, 555),
    }
    processes = ProcessTable(
        fake_proc(tmp_path, INITIAL_PID_NAMESPACE, everyone), hidden=lambda pid: False
    )

    assert ProcessStatus(alive=True, pid=31000, certain=True) == processes.locate(CONTAINED)


def test_process_in_a_container_keeps_its_host_pid_when_it_ends(tmp_path: Path) -> None:
    """The labels of a series do not change when the process ends."""
    proc = fake_proc(tmp_path, INITIAL_PID_NAMESPACE, {31000: (CONTAINER, 7, 555)})
    processes = ProcessTable(proc, hidden=lambda pid: False)
    processes.locate(CONTAINED)
    (proc / "31000" / "stat").unlink()

    assert ProcessStatus(alive=False, pid=31000) == processes.locate(CONTAINED)


@pytest.mark.parametrize(
    ("own", "expected"), [(INITIAL_PID_NAMESPACE, False), (CONTAINER + 5, None)]
)
def test_process_that_is_not_found(tmp_path: Path, own: int, expected: bool | None) -> None:
    """It has ended only if the exporter sees all processes of the node."""
    processes = ProcessTable(fake_proc(tmp_path, own, {}), hidden=lambda pid: False)

    assert ProcessStatus(expected, 7) == processes.locate(CONTAINED)


def test_ambiguous_process_is_not_attributed(tmp_path: Path) -> None:
    """Of two processes that match equally, neither is taken."""
    proc = fake_proc(
        tmp_path, INITIAL_PID_NAMESPACE, {1000: (CONTAINER, 7, 555), 2000: (CONTAINER, 7, 555)}
    )

    assert not ProcessTable(proc, hidden=lambda pid: False).locate(CONTAINED).certain


def test_hidden_process_may_be_alive(tmp_path: Path) -> None:
    """With hidepid, /proc does not show whether another user's process is alive."""
    processes = ProcessTable(
        fake_proc(tmp_path, INITIAL_PID_NAMESPACE, {}), hidden=lambda pid: True
    )

    assert ProcessStatus(None, os.getpid()) == processes.locate(
        own_process(pid_namespace=INITIAL_PID_NAMESPACE)
    )


def test_live_process_replaces_an_ended_one_with_the_same_labels(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """If a restarted rank gets the pid of its predecessor, the live process is exported."""
    publish(run_dir, own_sample(process=own_process(start_ticks=1), timestamp=time.time() + 10))
    living = own_sample()
    publish(run_dir, replace(living, steps=replace(living.steps, count=3)))

    metrics = scrape(open_exporter())

    assert metrics.value("torchmem_steps_total") == 3.0
    assert metrics.value("torchmem_process_state", state="running") == 1.0
