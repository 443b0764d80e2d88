"""The SDK in real processes: exit, crash, signals, fork."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from typing import Any

Run = Callable[..., subprocess.CompletedProcess[str]]
Published = Callable[[], list[dict[str, Any]]]


def test_a_clean_exit_is_marked(run_script: Run, published: Published) -> None:
    """A script that ends leaves its last state, marked as exited, and keeps its exit code."""
    done = run_script("sdk.instrument(backend=backend); allocator.malloc(30 << 20); backend.step()")

    assert (done.returncode, done.stderr) == (0, "")
    assert [sample["ended"] for sample in published()] == ["exited"]


def test_an_uncaught_oom_is_marked(run_script: Run, published: Published) -> None:
    """A script that dies of OutOfMemoryError is marked as such, and its traceback is unchanged."""
    done = run_script("sdk.instrument(backend=backend); backend.step(); allocator.malloc(2 << 30)")

    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stderr
    assert [sample["ended"] for sample in published()] == ["oom"]


def test_a_caught_oom_and_a_clean_end_is_an_exit(run_script: Run, published: Published) -> None:
    """A batch-size finder that catches its OOM and ends has exited."""
    run_script("""
sdk.instrument(backend=backend)
try:
    allocator.malloc(2 << 30)
except OutOfMemoryError:
    pass
""")

    assert [sample["ended"] for sample in published()] == ["exited"]


def test_a_killed_process_leaves_its_last_state(run_script: Run, published: Published) -> None:
    """After SIGKILL the file holds what was last published, with no ending."""
    done = run_script("""
sdk.instrument(backend=backend)
allocator.malloc(30 << 20); backend.step()
while not published(): time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
""")

    assert done.returncode == -signal.SIGKILL
    assert [sample.get("ended") for sample in published()] == [None]


def test_forked_workers_leave_no_trace(run_script: Run, published: Published) -> None:
    """A forked DataLoader worker publishes nothing, holds no socket, and exits cleanly."""
    done = run_script("""
class Cuda(SimulatedBackend):
    process = os.getpid()
    def is_initialized(self):  # PyTorch returns False in a forked child
        return os.getpid() == self.process and super().is_initialized()
backend = Cuda([allocator])
session = sdk.instrument(backend=backend, port=0, interval=0.01)
backend.step()
while not (url := session.url): time.sleep(0.01)
pid = os.fork()
if pid == 0:
    backend.step()
    assert session.url is None
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
import urllib.request
assert b"torchmem_process_info" in urllib.request.urlopen(url).read()
""")

    assert (done.returncode, done.stderr) == (0, "")
    assert len(published()) == 1


def test_a_fork_before_cuda_becomes_a_rank_of_its_own(
    run_script: Run, published: Published
) -> None:
    """Instrumented before forking, each child that starts CUDA publishes for itself."""
    done = run_script("""
backend = SimulatedBackend([allocator], initialized=False)
sdk.instrument(backend=backend)
children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        backend.init(); backend.step(); sys.exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
""")

    assert (done.returncode, done.stderr) == (0, "")
    assert len([sample for sample in published() if sample["steps"]["count"] == 1]) == 2


def test_a_fork_during_instrument(run_script: Run) -> None:
    """A child forked while another thread is in `instrument()` can call it without waiting."""
    done = run_script("""
entered, gate = threading.Event(), threading.Event()
class Slow(SimulatedBackend):
    def on_init(self, callback): entered.set(); gate.wait()
thread = threading.Thread(target=lambda: sdk.instrument(backend=Slow([allocator])))
thread.start(); entered.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)  # ends a child that hangs
    sdk.instrument(backend=backend); os._exit(0)
gate.set(); thread.join()
assert os.waitpid(pid, 0)[1] == 0
""")

    assert (done.returncode, done.stderr) == (0, "")


def test_multiprocessing_children_are_marked_at_their_end(
    run_script: Run, published: Published
) -> None:
    """Children of multiprocessing skip atexit, but their end is marked all the same."""
    done = run_script("""
import multiprocessing
def work():
    sdk.instrument(backend=backend, rank=5); backend.step()
process = multiprocessing.get_context("fork").Process(target=work)
process.start(); process.join()
""")

    assert (done.returncode, done.stderr) == (0, "")
    assert [(sample["process"]["rank"], sample["ended"]) for sample in published()] == [
        (5, "exited")
    ]


def test_without_torch_the_script_runs_on(run_script: Run) -> None:
    """Without PyTorch `instrument()` warns once and does nothing."""
    done = run_script("""
sys.modules["torch"] = None
sdk.instrument(); sdk.instrument()
print("trained")
""")

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("torchmem is inactive: PyTorch cannot be used here") == 1


def test_sigterm_publishes_before_the_scripts_own_handler(
    run_script: Run, published: Published
) -> None:
    """A script keeps its SIGTERM handler, and its state is published before the handler runs."""
    done = run_script("""
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
sdk.instrument(backend=backend, interval=3600.0)
backend.step()
os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)
""")

    assert (done.returncode, done.stderr) == (5, "")
    assert [sample["steps"]["count"] for sample in published()] == [1]


def test_sigterm_in_a_forked_child_leaves_the_parents_file_alone(
    run_script: Run, published: Published
) -> None:
    """A worker that inherits the handler does not overwrite the parent's newer numbers."""
    done = run_script("""
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
sdk.instrument(backend=backend)
backend.step()
reading, writing = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(writing, b"x"); time.sleep(30)
os.read(reading, 1)
backend.step(); wait_for_step(2)
os.kill(pid, signal.SIGTERM)
assert os.waitpid(pid, 0)[1] == 5 << 8
os.kill(os.getpid(), signal.SIGKILL)
""")

    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert [sample["steps"]["count"] for sample in published()] == [2]


def test_no_thread_can_be_started(run_script: Run, published: Published) -> None:
    """At the limit of threads the script runs on, and its last state is published at its end."""
    done = run_script("""
threading.stack_size(1 << 47)  # more than there is
sdk.instrument(backend=backend)
backend.step()
""")

    assert done.returncode == 0
    assert (
        done.stderr.strip()
        == "torchmem: setup failed and was skipped (RuntimeError: can't start new thread)"
    )
    assert [(sample["steps"]["count"], sample["ended"]) for sample in published()] == [
        (1, "exited")
    ]


def test_sigterm_without_a_handler_still_kills(run_script: Run) -> None:
    """The default action stays in place: a rank that hangs in the driver dies at once."""
    done = run_script("""
sdk.instrument(backend=backend)
os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)
""")

    assert done.returncode == -signal.SIGTERM
