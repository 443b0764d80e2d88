"""What the SDK must never do to a training process, on PyTorch's real allocator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.allocator

MIB = 1 << 20
Run = Callable[..., subprocess.CompletedProcess[str]]
Series = Callable[[str], list[tuple[dict[str, str], float]]]


def test_no_context_is_created_on_an_unused_gpu(run: Run, series: Series) -> None:
    """If a script uses the first of two GPUs, the second stays empty and is not shown."""
    done = run("""
sdk.instrument(snapshot_interval=0.02, snapshot_budget=1.0)
tensor = torch.zeros(1 << 20, device="cuda:0")
time.sleep(0.5)
print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
""")

    assert (done.returncode, done.stdout) == (0, "[True, False]\n"), done.stderr
    assert len(series("torchmem_reserved_peak_bytes")) == 1


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_instrument_works_before_and_after_cuda_starts(
    run: Run, series: Series, before: bool
) -> None:
    """`instrument()` may stand anywhere and does not start CUDA; peak and end are known."""
    line = "sdk.instrument(); assert not torch.cuda.is_initialized()\n"
    rest = "torch.zeros(64 << 20, dtype=torch.uint8, device='cuda')\n"
    done = run(line + rest if before else rest + line.split(";", maxsplit=1)[0] + "\n")

    assert (done.returncode, done.stderr) == (0, "")
    assert [value for _, value in series("torchmem_allocated_peak_bytes")] == [64.0 * MIB]
    assert [labels["state"] for labels, value in series("torchmem_process_state") if value] == [
        "exited"
    ]


def test_the_first_allocation_may_already_fail(run: Run, series: Series) -> None:
    """An OOM before any step is raised unchanged, counted by cause, and ends the rank as `oom`."""
    done = run("""
sdk.instrument()
torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
""")

    assert "\ntorch.OutOfMemoryError: CUDA out of memory." in done.stderr
    assert {labels["cause"]: value for labels, value in series("torchmem_ooms_total") if value} == {
        "capacity": 1.0
    }
    assert [labels["state"] for labels, value in series("torchmem_process_state") if value] == [
        "oom"
    ]


def test_a_failing_observer_never_replaces_the_error(run: Run) -> None:
    """If the observer raises, the script still catches OutOfMemoryError and can go on."""
    done = run("""
from torchmem.sdk.pytorch.backend import TorchBackend
torch.zeros(1, device="cuda")
def fail(*_): raise ValueError
TorchBackend().on_oom(fail)
try:
    torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("caught")
print(torch.zeros(1 << 20, device="cuda").numel())
""")

    assert (done.returncode, done.stdout) == (0, "caught\n1048576\n"), done.stderr


def test_ctrl_c_in_the_observer_reaches_the_script(run: Run) -> None:
    """What a signal handler raises in the observer is raised after the OutOfMemoryError."""
    done = run("""
import signal, traceback
from torchmem.sdk.pytorch.backend import TorchBackend
class Interrupted(TorchBackend):
    def memory_stats(self, device):
        # The SDK may read at other times, too.
        if any(frame.name == "observe" for frame in traceback.extract_stack()):
            os.kill(os.getpid(), signal.SIGINT)
        return super().memory_stats(device)
sdk.instrument(backend=Interrupted(), interval=3600)
torch.zeros(1, device="cuda")
try:
    try:
        torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("caught")
        signal.alarm(20)  # ends a script that is not interrupted
        while True: pass
except KeyboardInterrupt:
    print("interrupted")
""")

    assert (done.returncode, done.stdout) == (0, "caught\ninterrupted\n"), done.stderr


def test_ctrl_c_in_a_loop_of_errors_ends_it(run: Run) -> None:
    """In a loop that catches one OutOfMemoryError after the other, every Ctrl-C arrives."""
    done = run("""
import signal, threading
sdk.instrument(capture_on_oom=True)
torch.zeros(1, device="cuda")
main, interrupted = threading.main_thread().ident, 0
signal.alarm(60)  # ends a script that is not interrupted
def fail():
    while True:
        try:
            torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
for index in range(20):
    threading.Timer(0.05 + index * 0.001, signal.pthread_kill, (main, signal.SIGINT)).start()
    try:
        fail()
    except KeyboardInterrupt:
        interrupted += 1
print(interrupted)
""")

    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


def test_a_timeout_in_the_observer_reaches_the_script(run: Run) -> None:
    """A timeout that SIGALRM's handler raises arrives once, and so does the OutOfMemoryError."""
    done = run("""
import signal
class Timeout(Exception): pass
raised = 0
def handler(*_):
    global raised
    raised += 1
    raise Timeout
session = sdk.instrument(capture_on_oom=True)
torch.zeros(1, device="cuda")
signal.signal(signal.SIGALRM, handler)
delivered = 0
for index in range(100):
    try:
        before = raised
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + index * 0.00002)
        while raised == before:
            try:
                torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                pass
        for _ in range(1000): pass
    except Timeout:
        delivered += 1
print(raised, delivered, sum(session.errors.counts.values()))
""")

    assert (done.returncode, done.stdout) == (0, "100 100 0\n"), done.stderr


def test_data_loader_workers_may_be_forked(run: Run, series: Series) -> None:
    """Forked workers neither hang nor publish, and the parent's numbers stay right."""
    done = run("""
sdk.instrument(port=0)
held = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
time.sleep(0.2)
loader = torch.utils.data.DataLoader(torch.arange(64), num_workers=2, batch_size=8)
print(sum(len(batch) for _ in range(2) for batch in loader))
""")

    assert (done.returncode, done.stdout) == (0, "128\n"), done.stderr
    assert [value for _, value in series("torchmem_allocated_peak_bytes")] == [32.0 * MIB]


def test_counters_survive_the_users_resets(run: Run, series: Series) -> None:
    """Neither of PyTorch's resets lowers a counter or a peak of the SDK."""
    done = run("""
session = sdk.instrument(interval=1e-6)
def make(mib):
    tensor = torch.empty(mib << 20, dtype=torch.uint8, device="cuda"); session.step(); return tensor
for mib in (100, 200, 300): make(mib)
torch.cuda.reset_accumulated_memory_stats(); torch.cuda.reset_peak_memory_stats(); session.step()
torch.cuda.empty_cache(); make(50)
""")

    assert (done.returncode, done.stderr) == (0, "")
    assert [value for _, value in series("torchmem_allocated_peak_bytes")] == [300.0 * MIB]
    assert [value for _, value in series("torchmem_device_allocs_total")] == [4.0]


ENDING = """
import os, sys, time, torch
for _ in range(4):
    child = os.fork()
    if not child: break
    status = os.waitpid(child, 0)[1]
    if status != 7 << 8: sys.exit(f"a fork ended with {status:#x}")
from torchmem import sdk
sdk.instrument(interval=0.001, snapshot_interval=0.001, snapshot_budget=1.0)
held = [torch.zeros(1 << 20, device="cuda") for _ in range(200)]
time.sleep(0.05)
sys.exit(7)
"""


def test_the_process_ends_cleanly(environment: dict[str, str]) -> None:
    """An exit while the sampler works has no abort, no message, and the script's exit code."""
    # The server's forks skip PyTorch's destructors; those of the script do not.
    script = [sys.executable, "-W", "ignore", "-c", ENDING]
    command = [sys.executable, "-m", "torchmem.phantom", "--memory", "4GiB", "--", *script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_a_driver_that_hangs_stalls_no_other_python_thread(
    run: Run, environment: dict[str, str]
) -> None:
    """While the main thread hangs in cudaMalloc and a read is pending, other threads go on."""
    environment["PHANTOM_HOLD"] = environment["TORCHMEM_RUN_DIR"] + ".held"
    done = run("""
import pathlib, threading
from torchmem.sdk.pytorch.backend import TorchBackend
held, pending = pathlib.Path(os.environ["PHANTOM_HOLD"]), []
class Noting(TorchBackend):
    def call_soon(self, call):
        pending.append(call)
        super().call_soon(lambda: (call(), pending.clear()))
often = dict(interval=0.01, idle_after=0.01, snapshot_interval=0.01, snapshot_budget=1.0)
session = sdk.instrument(backend=Noting(), **often)
kept = [torch.zeros(1 << 20, device="cuda")]
session.step()
held.touch()

def other():  # the only thread that can end the hang
    while not pending: time.sleep(0.001)
    for _ in range(50): time.sleep(0.01)
    held.unlink()

threading.Thread(target=other).start()
kept.append(torch.empty(100 << 20, device="cuda"))
print("went on")
""")

    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_compiled_code_is_left_alone(run: Run) -> None:
    """Reads and the OOM observer are not compiled when they interrupt a torch.compile region."""
    done = run("""
from torch._dynamo.utils import counters
from torchmem.sdk.pytorch.backend import TorchBackend
class Counting(TorchBackend):
    snapshots = 0
    def memory_snapshot(self):
        self.snapshots += 1
        return super().memory_snapshot()
backend = Counting()
often = dict(interval=0.001, idle_after=0.001, snapshot_interval=0.001, snapshot_budget=1.0)
sdk.instrument(backend=backend, **often)
@torch.compile(backend="eager")
def region(size):
    # After a break in a loop Python runs this frame, and Dynamo examines what is called from it.
    for _ in range(100):
        torch._dynamo.graph_break()
        tensor = torch.empty(size, device="cuda")
        for _ in range(10000): pass

region(1)
frames = counters["frames"]["total"]
enough = backend.snapshots + 20
while backend.snapshots < enough: region(1)
try:
    region(5 << 30)
except torch.OutOfMemoryError:
    print(counters["frames"]["total"] - frames, published()[0]["oom_pending"])
""")

    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr


@pytest.mark.parametrize("stacks", [False, True])
def test_the_profiler_sees_the_same_allocations(run: Run, stacks: bool) -> None:
    """PyTorch's profiler records the same memory events, and sums them as without the SDK.

    With stacks its sums by function count an allocation once more for each Python thread, of which
    the SDK has one.
    """
    program = f"""
from torch.profiler import ProfilerActivity, profile
INSTRUMENT
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
with profile(
    activities=[ProfilerActivity.CPU], profile_memory=True, with_stack={stacks}
) as profiler:
    for _ in range(3):
        model(torch.ones(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def is_memory(event):
    try:
        return event.name() == "[memory]"
    except UnicodeDecodeError:  # PyTorch 2.13 may lose the name of a function of the profiler's own
        return False
events = profiler.profiler.kineto_results.events()
print([event.nbytes() for event in events if is_memory(event)])
if not {stacks}:
    print(sum(event.self_device_memory_usage for event in profiler.key_averages()))
"""
    plain, monitored = (
        run(program.replace("INSTRUMENT", line)) for line in ("pass", "sdk.instrument()")
    )

    assert (plain.returncode, monitored.returncode) == (0, 0), monitored.stderr
    assert len(plain.stdout) > 100
    assert plain.stdout == monitored.stdout


def test_a_closed_session_is_collected(run: Run) -> None:
    """Of 20 sessions with all that they attach to PyTorch, none is kept after its end."""
    done = run("""
import gc
from weakref import ref
model = torch.nn.Linear(64, 64)
def step():
    optimizer = torch.optim.SGD(model.parameters())
    device = next(model.parameters()).device
    model(torch.ones(4, 64, device=device)).sum().backward()
    optimizer.step()
known = []
for number in range(20):
    session = sdk.instrument(
        interval=1e-9, port=0, history=True, release="hooks=0.5,cache=0.3,emergency",
        reset_peaks=True,
    )
    if number == 1:
        model.cuda()
    session.on_pressure(lambda wanted: 0)
    session.track("model", model)
    step()
    if number > 1:
        try:
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            pass
        step()
    session.close()
    known.append(ref(session))
    del session
gc.collect()
print(sum(each() is not None for each in known), sdk.current_session())
""")

    assert (done.returncode, done.stdout) == (0, "0 None\n"), done.stderr
