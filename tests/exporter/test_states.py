"""What is said about a process: from its own last word and from the kernel's, never from hope."""

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
from torchmem.exporter.run_directory import RunDirectory, process_state
from torchmem.sample.process_table import INITIAL_PID_NAMESPACE, ProcessStatus, ProcessTable
from torchmem.sample.procfs import start_ticks
from torchmem.sample.sample import Ending, Process, State

OpenExporter = Callable[..., Exporter]
CONTAINER = 4026532999


@contextmanager
def child() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    """A process of its own, and how it would name itself."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as popen:
        try:
            ticks = until(lambda: start_ticks(popen.pid))
            yield popen, own_process(pid=popen.pid, start_ticks=ticks)
        finally:
            popen.kill()


def states(directory: RunDirectory, now: float | None = None) -> list[State]:
    """The states of everything that is shown."""
    return [item.state for item in directory.read(time.time() if now is None else now)]


@pytest.mark.parametrize(
    ("alive", "ended", "oom_pending", "age", "expected"),
    [
        (True, None, False, 0, "running"),
        (True, None, True, 0, "running"),
        (True, None, False, 9999, "running"),
        (True, "exited", False, 0, "exited"),
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
def test_state_follows_the_evidence(
    alive: bool | None, ended: Ending | None, oom_pending: bool, age: float, expected: State
) -> None:
    """Own last word, then liveness, then a pending OOM; a hidden process is judged by the age of its file."""
    sample = own_sample(ended=ended, oom_pending=oom_pending)

    assert expected == process_state(sample, ProcessStatus(alive, 1), sample.timestamp + age, age)


@pytest.mark.parametrize(
    ("last_step", "patience", "expected"),
    [
        (100.0, 300.0, "running"),
        (301.0, 300.0, "stalled"),
        (301.0, None, "running"),
        (None, 300.0, "running"),
    ],
)
def test_a_living_process_without_steps_has_stalled(
    last_step: float | None, patience: float | None, expected: State
) -> None:
    """No step for longer than the process allowed itself, after there were some: stalled, also when it is silent."""
    sample = own_sample()
    then = None if last_step is None else sample.timestamp - last_step
    stepped = replace(
        sample, steps=replace(sample.steps, last_timestamp=then), stall_after_seconds=patience
    )

    assert expected == process_state(stepped, ProcessStatus(alive=True, pid=1), sample.timestamp, 0)
    assert "killed" == process_state(
        stepped, ProcessStatus(alive=False, pid=1), sample.timestamp, 0
    )


@pytest.mark.parametrize(("oom_pending", "expected"), [(False, "killed"), (True, "oom")])
def test_sigkilled_process_keeps_its_last_values(
    open_exporter: OpenExporter, run_dir: Path, oom_pending: bool, expected: State
) -> None:
    """After SIGKILL the numbers of the rank's last moment stay, with the state that explains its end."""
    exporter = open_exporter()
    with child() as (popen, process):
        publish(run_dir, own_sample(process=process, oom_pending=oom_pending))
        before = scrape(exporter)
        popen.send_signal(signal.SIGKILL)
        popen.wait()
        after = scrape(exporter)

    assert 1.0 == before.value("torchmem_process_state", state="running")
    assert 1.0 == after.value("torchmem_process_state", state=expected)
    assert 0.0 == after.value("torchmem_process_state", state="running")
    assert before.series["torchmem_reserved_bytes"] == after.series["torchmem_reserved_bytes"]


def test_unreaped_process_counts_as_dead(run_dir: Path) -> None:
    """A zombie that its launcher has not collected yet has ended."""
    with child() as (popen, process):
        publish(run_dir, own_sample(process=process))
        popen.send_signal(signal.SIGKILL)

        assert ["killed"] == until(
            lambda: states(RunDirectory(run_dir)) == ["killed"] and ["killed"]
        )


def test_reused_pid_is_another_process(run_dir: Path) -> None:
    """The same pid with another start time does not keep a dead rank alive."""
    publish(run_dir, own_sample(process=own_process(start_ticks=1)))

    assert ["killed"] == states(RunDirectory(run_dir))


def test_exporter_before_and_after_training(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A missing directory is no error, a rank appears when it writes, and a new exporter shows the same at once."""
    early = open_exporter()
    empty = scrape(early)
    publish(run_dir, own_sample())

    assert 1.0 == empty.value("torchmem_exporter_collector_success", collector="samples")
    assert {} == empty.matching("torchmem_process_state")
    assert 1.0 == scrape(early).value("torchmem_process_state", state="running")
    assert (
        scrape(early).series["torchmem_alloc_retries_total"]
        == (scrape(open_exporter()).series["torchmem_alloc_retries_total"])
    )


def test_unreadable_directory_fails_only_its_collector(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """What is wrong with the run directory is a metric, not a failed scrape."""
    run_dir.write_text("not a directory")

    shown = scrape(open_exporter())

    assert 0.0 == shown.value("torchmem_exporter_collector_success", collector="samples")
    assert 1.0 == shown.value("nvml_up")


def test_final_values_go_after_their_time(run_dir: Path) -> None:
    """An ended process is shown for the time to live after its last write, then its file is removed."""
    path = publish(run_dir, own_sample(ended="exited"))
    directory, written = RunDirectory(run_dir, ttl_seconds=900), path.stat().st_mtime

    assert ["exited"] == states(directory, written + 899)
    assert [] == states(directory, written + 901)
    assert not path.exists()


def test_time_to_live_counts_from_the_death_of_a_silent_process(run_dir: Path) -> None:
    """A rank that hung without a word for an hour and is killed then is still shown as killed."""
    with child() as (popen, process):
        path = publish(run_dir, own_sample(process=process))
        directory, written = RunDirectory(run_dir, ttl_seconds=900), path.stat().st_mtime
        assert ["running"] == states(directory, written + 3600)
        popen.kill()
        popen.wait()

        assert ["killed"] == states(directory, written + 3700)
        assert [] == states(directory, written + 3600 + 901)


def test_living_process_is_never_dropped(run_dir: Path) -> None:
    """Silence is no death: the sample's timestamp tells how old the values are."""
    path = publish(run_dir, own_sample())

    assert ["running"] == states(
        RunDirectory(run_dir, ttl_seconds=900), path.stat().st_mtime + 10**6
    )


def fake_proc(root: Path, own: int, processes: Mapping[int, tuple[int, int, int]]) -> Path:
    """A /proc of an exporter in namespace `own`: host pid → (namespace, pid in it, start ticks)."""
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
    """Whether this user may make a pid namespace here."""
    return (
        subprocess.run(
            ["unshare", "--pid", "--fork", "true"], capture_output=True, check=False
        ).returncode
        == 0
    )


@pytest.mark.skipif(
    not shutil.which("unshare") or not may_unshare(), reason="making a pid namespace needs root"
)
def test_real_pid_namespace(root: Path, run_dir: Path) -> None:
    """A rank that is pid 1 in its own namespace is shown under its host pid, alive and after it was killed."""
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

    assert (1, "running", True) == (alive.sample.process.pid, alive.state, alive.attributed)
    assert alive.pid not in {1, popen.pid}
    assert alive.pid == dead.pid


CONTAINED = own_process(pid=7, pid_namespace=CONTAINER, start_ticks=555)


def test_process_in_a_container_is_found_by_its_host_pid(tmp_path: Path) -> None:
    """From the host, a rank that calls itself pid 7 in its container is shown with the pid that NVML knows."""
    everyone = {
        31000: (CONTAINER, 7, 555),
        32000: (CONTAINER + 1, 7, 555),
        33000: (CONTAINER, 8, 555),
    }
    processes = ProcessTable(
        fake_proc(tmp_path, INITIAL_PID_NAMESPACE, everyone), hidden=lambda pid: False
    )

    assert ProcessStatus(alive=True, pid=31000, certain=True) == processes.locate(CONTAINED)


def test_process_in_a_container_keeps_its_host_pid_when_it_dies(tmp_path: Path) -> None:
    """The labels of a series do not change at the moment of death."""
    proc = fake_proc(tmp_path, INITIAL_PID_NAMESPACE, {31000: (CONTAINER, 7, 555)})
    processes = ProcessTable(proc, hidden=lambda pid: False)
    processes.locate(CONTAINED)
    (proc / "31000" / "stat").unlink()

    assert ProcessStatus(alive=False, pid=31000) == processes.locate(CONTAINED)


@pytest.mark.parametrize(
    ("own", "expected"), [(INITIAL_PID_NAMESPACE, False), (CONTAINER + 5, None)]
)
def test_process_that_is_not_found_is_dead_only_for_who_sees_all(
    tmp_path: Path, own: int, expected: bool | None
) -> None:
    """An exporter in a container of its own cannot know about its neighbours."""
    processes = ProcessTable(fake_proc(tmp_path, own, {}), hidden=lambda pid: False)

    assert ProcessStatus(expected, 7) == processes.locate(CONTAINED)


def test_ambiguous_process_is_not_attributed(tmp_path: Path) -> None:
    """Two candidates that the kernel does not let us tell apart are nobody's."""
    proc = fake_proc(
        tmp_path, INITIAL_PID_NAMESPACE, {1000: (CONTAINER, 7, 555), 2000: (CONTAINER, 7, 555)}
    )

    assert not ProcessTable(proc, hidden=lambda pid: False).locate(CONTAINED).certain


def test_hidden_process_is_not_dead(tmp_path: Path) -> None:
    """With hidepid, another user's process is unseen, not gone."""
    processes = ProcessTable(
        fake_proc(tmp_path, INITIAL_PID_NAMESPACE, {}), hidden=lambda pid: True
    )

    assert ProcessStatus(None, os.getpid()) == processes.locate(
        own_process(pid_namespace=INITIAL_PID_NAMESPACE)
    )


def test_newer_identity_wins_over_a_dead_one_with_the_same_labels(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """When the kernel gives a restarted rank the pid of its predecessor, the living one is shown."""
    publish(run_dir, own_sample(process=own_process(start_ticks=1), timestamp=time.time() + 10))
    living = own_sample()
    publish(run_dir, replace(living, steps=replace(living.steps, count=3)))

    shown = scrape(open_exporter())

    assert 3.0 == shown.value("torchmem_steps_total")
    assert 1.0 == shown.value("torchmem_process_state", state="running")
