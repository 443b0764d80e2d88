"""The SDK in real processes: exit, crash, SIGKILL, fork."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from typing import Any

Run = Callable[..., subprocess.CompletedProcess[str]]
Published = Callable[[], list[dict[str, Any]]]


def test_a_clean_exit_is_marked(run_script: Run, published: Published) -> None:
    """A script that ends leaves its last state, marked as exited, and an exit code of its own."""
    done = run_script("allocator.malloc(30 << 20); backend.step()")

    assert (0, "") == (done.returncode, done.stderr)
    assert ["exited"] == [sample["ended"] for sample in published()]


def test_an_uncaught_oom_is_marked(run_script: Run, published: Published) -> None:
    """A script that dies of OutOfMemoryError leaves that as its ending, and its traceback is untouched."""
    done = run_script("backend.step(); allocator.malloc(2 << 30)")

    assert 1 == done.returncode
    assert "OutOfMemoryError" in done.stderr
    assert ["oom"] == [sample["ended"] for sample in published()]


def test_a_caught_oom_and_a_clean_end_is_an_exit(run_script: Run, published: Published) -> None:
    """A batch-size finder that catches its OOM and leaves has exited."""
    run_script("""
try:
    allocator.malloc(2 << 30)
except OutOfMemoryError:
    pass
""")

    assert ["exited"] == [sample["ended"] for sample in published()]


def test_a_killed_process_leaves_its_last_state(run_script: Run, published: Published) -> None:
    """After SIGKILL the file holds what was last published and no ending."""
    done = run_script("""
allocator.malloc(30 << 20); backend.step()
while not session._monitor.publisher.file.path.exists(): time.sleep(0.01)
os.kill(os.getpid(), 9)
""")

    assert -signal.SIGKILL == done.returncode
    assert [None] == [sample.get("ended") for sample in published()]


def test_forked_workers_leave_no_trace(run_script: Run, published: Published) -> None:
    """A forked DataLoader-like worker publishes nothing, holds no socket of ours and exits cleanly."""
    done = run_script("""
backend.step()
session.close(); from torchmem.sdk import _session; _session._current = None
session = sdk.instrument(backend=backend, interval=0.05, port=0)
url = session.url
pid = os.fork()
if pid == 0:
    backend._initialized = False  # PyTorch answers False in a forked child
    backend.step()
    assert session.url is None
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
import urllib.request
assert b"torchmem_process_info" in urllib.request.urlopen(url).read()
""")

    assert (0, "") == (done.returncode, done.stderr)
    assert 1 == len(published())


def test_a_fork_before_cuda_becomes_a_rank_of_its_own(
    run_script: Run, published: Published
) -> None:
    """Instrumented before forking, each child that starts CUDA publishes for itself."""
    done = run_script("""
session.close(); from torchmem.sdk import _session; _session._current = None
backend = SimulatedBackend([allocator], initialized=False)
session = sdk.instrument(backend=backend, interval=0.05)
children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        backend.init(); backend.step(); sys.exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
""")

    assert (0, "") == (done.returncode, done.stderr)
    assert 2 == len([sample for sample in published() if sample["steps"]["count"] == 1])


def test_a_fork_in_the_midst_of_instrument(run_script: Run) -> None:
    """A child that was forked while another thread called `instrument()` can call it itself and does not wait."""
    done = run_script("""
session.close(); from torchmem.sdk import _session; _session._current = None
import signal, threading
entered, gate = threading.Event(), threading.Event()
class Slow(SimulatedBackend):
    def on_init(self, callback): entered.set(); gate.wait()
thread = threading.Thread(target=lambda: sdk.instrument(backend=Slow([allocator])))
thread.start(); entered.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)  # ends a child that hangs
    sdk.instrument(backend=SimulatedBackend([allocator])); os._exit(0)
gate.set(); thread.join()
assert os.waitpid(pid, 0)[1] == 0
""")

    assert (0, "") == (done.returncode, done.stderr)


def test_multiprocessing_children_end_with_a_mark(run_script: Run, published: Published) -> None:
    """Children of multiprocessing skip atexit, yet their end is marked."""
    done = run_script("""
import multiprocessing
def work():
    child = SimulatedBackend([allocator])
    from torchmem.sdk import _session; _session._current = None
    sdk.instrument(backend=child, interval=0.05, rank=5); child.step()
process = multiprocessing.get_context("fork").Process(target=work)
process.start(); process.join()
""")

    assert (0, "") == (done.returncode, done.stderr)
    assert [(5, "exited")] == [
        (s["process"]["rank"], s["ended"]) for s in published() if s["process"]["rank"]
    ]


def test_without_torch_the_script_runs_on(run_script: Run, published: Published) -> None:
    """With no PyTorch installed `instrument()` warns once and does nothing."""
    done = run_script("""
session.close(); from torchmem.sdk import _session; _session._current = None
sys.modules["torch"] = None
sdk.instrument(); sdk.instrument()
print("trained")
""")

    assert (0, "trained\n") == (done.returncode, done.stdout)
    assert 1 == done.stderr.count("torchmem watches nothing")


def test_sigterm_flushes_before_the_scripts_own_handler(
    run_script: Run, published: Published
) -> None:
    """A script with its own SIGTERM handler keeps it, and what it had at that moment is published first."""
    done = run_script("""
session.close(); from torchmem.sdk import _session; _session._current = None
import signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
session = sdk.instrument(backend=backend, interval=3600.0)
backend.step()
os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)
""")

    assert (5, "") == (done.returncode, done.stderr)
    assert [1] == [sample["steps"]["count"] for sample in published()]


def test_sigterm_in_a_forked_child_leaves_the_parents_file_alone(
    run_script: Run, published: Published
) -> None:
    """A worker inherits the handler; when it is told to end, the parent's newer numbers stay."""
    done = run_script("""
session.close(); from torchmem.sdk import _session; _session._current = None
import signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
session = sdk.instrument(backend=backend, interval=3600.0)
backend.step()
reading, writing = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(writing, b"x"); time.sleep(30)
os.read(reading, 1)
backend.step(); session._monitor.publisher.publish()
os.kill(pid, signal.SIGTERM)
assert os.waitpid(pid, 0)[1] == 5 << 8
os.kill(os.getpid(), signal.SIGKILL)
""")

    assert (-signal.SIGKILL, "") == (done.returncode, done.stderr)
    assert [2] == [sample["steps"]["count"] for sample in published()]


def test_no_thread_can_be_started(run_script: Run, published: Published) -> None:
    """Where the limit of threads is reached the script runs on, and its last state is published at its end."""
    done = run_script("""
session.close(); from torchmem.sdk import _session; _session._current = None
import threading
threading.stack_size(1 << 47)  # more than there is
session = sdk.instrument(backend=backend)
backend.step()
""")

    assert 0 == done.returncode
    assert (
        "torchmem: setup failed and is left out (RuntimeError: can't start new thread)"
        == done.stderr.strip()
    )
    assert [(1, "exited")] == [
        (sample["steps"]["count"], sample["ended"]) for sample in published()
    ]


def test_sigterm_without_a_handler_kills_as_ever(run_script: Run) -> None:
    """The default action stays the default action: a rank that hangs in the driver dies at once."""
    done = run_script("import signal; os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)")

    assert -signal.SIGTERM == done.returncode
