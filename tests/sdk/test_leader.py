"""`leader_port`: one process serves all of this user's processes on the host; real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.exposition import Exposition
from support.publishing import own_process, own_sample, publish
from support.stack import answers, free_port, get
from support.waiting import until

from torchmem.metrics.families import ProcessView
from torchmem.sample.sample import State
from torchmem.sdk.publish.leader import LOCK_NAME, Leader, distinct
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.session import Session
from torchmem.simulator.backend import SimulatedBackend

RANKS = 8
RANK = """
import sys
from torchmem import sdk
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

GPU = SimulatedGpu(1 << 30, context_bytes=0, uuid="GPU-1")
backend = SimulatedBackend([DeviceCachingAllocator(GPU)])
with sdk.instrument(backend=backend, interval=0.2):
    backend.step()
    sys.stdin.read()
"""


class Pod:
    """Eight ranks on one host, which end when their standard input is closed."""

    def __init__(self, run_dir: Path, port: int, stack: ExitStack) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self._port = port
        environment = {
            **{name: text for name, text in os.environ.items() if "TORCHMEM" not in name},
            "TORCHMEM_RUN_DIR": str(run_dir),
            "TORCHMEM_LEADER_PORT": str(port),
            "TORCHMEM_RUN": "night",
            "WORLD_SIZE": str(RANKS),
        }
        self.ranks = {
            rank: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            for rank in range(RANKS)
        }
        for process in self.ranks.values():
            stack.callback(process.kill)

    def states(self) -> dict[str, str]:
        """Return the state of each rank as the leader serves it; none without a leader."""
        if not answers(self.url):
            return {}
        page = Exposition.of_text(get(self.url).decode())
        return {
            dict(labels)["rank"]: dict(labels)["state"]
            for labels, value in page.matching("torchmem_process_state", run="night").items()
            if value == 1
        }

    def leader(self) -> int:
        """Return the rank whose process listens on the port."""
        inodes = {
            line.split()[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{self._port:04X}")
        }
        leaders = [
            rank
            for rank, process in self.ranks.items()
            if process.poll() is None
            if _open_files(process.pid) & {f"socket:[{inode}]" for inode in inodes}
        ]
        (leader,) = leaders
        return leader


def _open_files(pid: int) -> set[str]:
    """Return what a process has open, but for what it closes meanwhile."""
    files: set[str] = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            files.add(str(file.readlink()))
    return files


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    """Return eight ranks that publish in `tmp_path`."""
    with ExitStack() as stack:
        yield Pod(tmp_path, free_port(), stack)


def test_one_of_eight_ranks_serves_all_until_the_last_has_ended(pod: Pod) -> None:
    """One rank serves all; after kill -9 and after a clean end another one does, with all states.

    No rank logs a warning about the port, and with the last rank the port is closed.
    """
    expected = {str(rank): "running" for rank in range(RANKS)}
    until(lambda: pod.states() == expected)
    for end, state in ((signal.SIGKILL, "killed"), (None, "exited")):
        leader = pod.leader()
        process = pod.ranks[leader]
        if end:
            process.send_signal(end)
        elif process.stdin:
            process.stdin.close()
        process.wait(60)
        expected[str(leader)] = state
        until(lambda: pod.states() == expected)
        assert pod.leader() != leader

    errors = b""
    for process in pod.ranks.values():
        if process.returncode is None:
            errors += process.communicate(timeout=60)[1]
    assert errors == b""
    assert not answers(pod.url)


def test_a_forked_worker_does_not_keep_the_port(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """After the leader was killed, a worker that it forked holds neither the lock nor the port."""
    port = free_port()
    done = run_script(f"""
import fcntl, socket, urllib.request
sdk.instrument(backend=backend, leader_port={port})
def serves():
    try:
        return b"torchmem_process_info" in urllib.request.urlopen(
            "http://127.0.0.1:{port}/metrics", timeout=30).read()
    except OSError:
        return False
backend.step()
while not serves(): time.sleep(0.01)
worker_started, leader_killed = os.pipe(), os.pipe()
leader = os.getpid()
if os.fork() == 0:
    os.setsid()
    os.close(leader_killed[1])
    os.write(worker_started[1], b"x")
    os.read(leader_killed[0], 1)  # until the pipe is closed by the death of the leader
    lock = open(glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/leader.lock")[0], "r+b")
    for _ in range(3000):  # a killed process closes pipe, lock, and socket one by one
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            server = socket.create_server(("127.0.0.1", {port}))
            break
        except OSError:
            time.sleep(0.01)
    else:
        os._exit(1)
    print("free", flush=True)
    os._exit(0)
os.read(worker_started[0], 1)
os.kill(leader, signal.SIGKILL)
""")

    assert (done.stdout, done.stderr) == ("free\n", "")


def test_a_port_of_another_program_is_reported_once(
    backend: SimulatedBackend,
    open_session: Callable[..., Session],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If another program has the port, one warning names it; once it is free, it is served."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        session = open_session(backend, leader_port=port, interval=0.01)
        backend.step()
        until(lambda: caplog.messages)  # after it was counted
        time.sleep(0.1)

        assert session.errors.counts["endpoint"] == 1
        assert [f"127.0.0.1:{port}" in message for message in caplog.messages] == [True]
    assert until(lambda: answers(f"http://127.0.0.1:{port}/metrics"))


def leader_of(run_dir: Path, hostname: str = "node1") -> Leader:
    """Return a leader that serves what is published in `run_dir`."""
    leader = Leader(run_dir / str(os.geteuid()), hostname, "127.0.0.1", free_port(), Errors())
    leader.campaign()
    return leader


def page(run_dir: Path) -> Exposition:
    """Return what a leader serves."""
    leader = leader_of(run_dir)
    try:
        return Exposition.of_text(get(leader.url or "").decode())
    finally:
        leader.close()


def test_only_valid_samples_of_this_host_are_served(tmp_path: Path) -> None:
    """Files that are not samples, and those of other pods in a shared directory, are left out."""
    publish(tmp_path, own_sample(), "1-1-1.sample.json")
    publish(tmp_path, b"{}", "1-2-2.sample.json")
    publish(tmp_path, b"\x80", "1-3-3.sample.json")
    elsewhere = own_sample(process=own_process(hostname="other-pod", rank=7))
    publish(tmp_path, elsewhere, "1-4-4.sample.json")
    os.mkfifo(tmp_path / str(os.geteuid()) / "1-5-5.sample.json")

    assert page(tmp_path).by("rank", "torchmem_process_info") == {"0": 1.0}


def test_a_process_that_ended_is_served_for_fifteen_minutes(tmp_path: Path) -> None:
    """The last state of a rank stays as long as in the exporter."""
    killed = own_sample(process=own_process(start_ticks=1, pid=1 << 21))
    file = publish(tmp_path, killed)

    assert page(tmp_path).value("torchmem_process_state", state="killed") == 1.0
    written = time.time() - 1000
    os.utime(file, (written, written))
    assert page(tmp_path).series == {}


def test_processes_with_the_same_labels() -> None:
    """No series is served twice: a live process hides an earlier one; one elsewhere is renamed."""

    def view(state: State, namespace: int) -> ProcessView:
        return ProcessView(own_sample(process=own_process(pid_namespace=namespace)), 7, state, {})

    ended, live, elsewhere = view("killed", 5), view("running", 5), view("stalled", 6)
    served = [(view.pid, view.state) for view in distinct([ended, live, elsewhere, elsewhere])]
    assert served == [(7, "running"), ("7@6", "stalled")]
    assert [ended] == list(distinct([ended, ended]))


def test_hosts_that_share_a_directory_have_a_leader_each(tmp_path: Path) -> None:
    """Two pods with one directory on a volume both serve, on the same file."""
    publish(tmp_path, own_sample())
    leaders = [leader_of(tmp_path), leader_of(tmp_path, "other-pod")]

    assert all(leader.url for leader in leaders)
    assert len(list(tmp_path.rglob(LOCK_NAME))) == 1
    for leader in leaders:
        leader.close()
