"""What the SDK must never do to a training process, on PyTorch's real allocator."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.allocator

MIB = 1 << 20
Run = Callable[..., subprocess.CompletedProcess[str]]
Series = Callable[[str], list[tuple[dict[str, str], float]]]


def test_no_context_appears_on_a_card_the_script_does_not_use(run: Run, series: Series) -> None:
    """With two cards and a script on the first, the second stays empty and is not shown."""
    done = run("""
sdk.instrument(snapshot_interval=0.02, snapshot_budget=1.0)
tensor = torch.zeros(1 << 20, device="cuda:0")
time.sleep(0.5)
print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
""")

    assert (0, "[True, False]\n") == (done.returncode, done.stdout), done.stderr
    assert 1 == len(series("torchmem_reserved_peak_bytes"))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_instrument_works_before_and_after_cuda_starts(
    run: Run, series: Series, before: bool
) -> None:
    """The one line may stand anywhere: peak and end are known either way, and CUDA is not started by it."""
    line = "sdk.instrument(); assert not torch.cuda.is_initialized()\n"
    rest = "torch.zeros(64 << 20, dtype=torch.uint8, device='cuda')\n"
    done = run(line + rest if before else rest + line.split(";", maxsplit=1)[0] + "\n")

    assert (0, "") == (done.returncode, done.stderr)
    assert [64.0 * MIB] == [value for _, value in series("torchmem_allocated_peak_bytes")]
    assert ["exited"] == [
        labels["state"] for labels, value in series("torchmem_process_state") if value
    ]


def test_the_first_allocation_may_already_fail(run: Run, series: Series) -> None:
    """An OOM before any step is counted with its cause, stays an OutOfMemoryError, and ends the rank as `oom`."""
    done = run("""
sdk.instrument()
torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
""")

    assert done.stderr.splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert {"capacity": 1.0} == {
        labels["cause"]: value for labels, value in series("torchmem_ooms_total") if value
    }
    assert ["oom"] == [
        labels["state"] for labels, value in series("torchmem_process_state") if value
    ]


def test_a_failing_observer_never_replaces_the_error(run: Run) -> None:
    """Even when everything in our observer raises, the script catches OutOfMemoryError and can go on."""
    done = run("""
session = sdk.instrument()
torch.zeros(1, device="cuda")
def fail(*_): raise ValueError
session._monitor.recorder.record_oom = fail
try:
    torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("caught")
print(torch.zeros(1 << 20, device="cuda").numel())
""")

    assert (0, "caught\n1048576\n") == (done.returncode, done.stdout), done.stderr


def test_ctrl_c_in_the_observer_is_still_the_scripts(run: Run) -> None:
    """What a signal handler raises while our observer works comes after the OutOfMemoryError, and is not lost."""
    done = run("""
import signal
session = sdk.instrument()
torch.zeros(1, device="cuda")
session._monitor.recorder.record_oom = lambda *_: os.kill(os.getpid(), signal.SIGINT)
try:
    try:
        torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("caught")
        signal.alarm(20)  # ends a script that waits in vain
        while True: pass
except KeyboardInterrupt:
    print("interrupted")
""")

    assert (0, "caught\ninterrupted\n") == (done.returncode, done.stdout), done.stderr


def test_data_loader_workers_may_be_forked(run: Run, series: Series) -> None:
    """Forked workers after instrument() neither hang nor publish; the parent's numbers stay right."""
    done = run("""
sdk.instrument(port=0)
held = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
time.sleep(0.2)
loader = torch.utils.data.DataLoader(torch.arange(64), num_workers=2, batch_size=8)
print(sum(len(batch) for _ in range(2) for batch in loader))
""")

    assert (0, "128\n") == (done.returncode, done.stdout), done.stderr
    assert [32.0 * MIB] == [value for _, value in series("torchmem_allocated_peak_bytes")]


def test_counters_survive_the_users_resets(run: Run, series: Series) -> None:
    """`reset_accumulated_memory_stats` and `reset_peak_memory_stats` move nothing of ours back."""
    done = run("""
session = sdk.instrument(interval=1e-6)
def make(mib):
    tensor = torch.empty(mib << 20, dtype=torch.uint8, device="cuda"); session.step(); return tensor
for mib in (100, 200, 300): make(mib)
torch.cuda.reset_accumulated_memory_stats(); torch.cuda.reset_peak_memory_stats(); session.step()
torch.cuda.empty_cache(); make(50)
""")

    assert (0, "") == (done.returncode, done.stderr)
    assert [300.0 * MIB] == [value for _, value in series("torchmem_allocated_peak_bytes")]
    assert [4.0] == [value for _, value in series("torchmem_device_allocs_total")]


def test_the_process_ends_as_fast_as_without_us(run: Run) -> None:
    """Leaving with the sampler in the middle of its work is clean: no abort, no message, the script's exit code."""
    for _ in range(5):
        done = run("""
sdk.instrument(interval=0.001, snapshot_interval=0.001, snapshot_budget=1.0)
held = [torch.zeros(1 << 20, device="cuda") for _ in range(200)]
time.sleep(0.05)
sys.exit(7)
""")
        assert (7, "", "") == (done.returncode, done.stdout, done.stderr)


def test_a_driver_that_hangs_stalls_no_other_python_thread(
    run: Run, environment: dict[str, str]
) -> None:
    """While the main thread is stuck in cudaMalloc other Python threads go on, although the sampler wants to read."""
    environment["PHANTOM_HOLD"] = environment["TORCHMEM_RUN_DIR"] + ".held"
    done = run("""
import pathlib, threading
held = pathlib.Path(os.environ["PHANTOM_HOLD"])
session = sdk.instrument(interval=0.01, idle_after=0.01, snapshot_interval=0.01, snapshot_budget=1.0)
kept = [torch.zeros(1 << 20, device="cuda")]
session.step()
held.touch()

def other():  # the only one who can end the hang
    while session._monitor._moments._errand is None or session._monitor._moments._errand.done(): time.sleep(0.001)
    for _ in range(50): time.sleep(0.01)
    held.unlink()

threading.Thread(target=other).start()
kept.append(torch.empty(100 << 20, device="cuda"))
print("went on")
""")

    assert (0, "went on\n") == (done.returncode, done.stdout), done.stderr


def test_compiled_code_is_left_alone(run: Run) -> None:
    """Neither the sampler's reads nor the OOM observer are compiled when they interrupt a torch.compile region."""
    done = run("""
from torch._dynamo.utils import counters
session = sdk.instrument(interval=0.001, idle_after=0.001, snapshot_interval=0.001, snapshot_budget=1.0)
@torch.compile(backend="eager")
def region(size):
    for _ in range(100):  # a break in a loop: Python runs this frame, and Dynamo looks at whatever is called from it
        torch._dynamo.graph_break()
        tensor = torch.empty(size, device="cuda")
        for _ in range(10000): pass

region(1)
frames, snapshots = counters["frames"]["total"], set()
while len(snapshots) < 20:
    region(1)
    snapshots.add(session._monitor.recorder.snapshot_seconds)
try:
    region(5 << 30)
except torch.OutOfMemoryError:
    print(counters["frames"]["total"] - frames, session._monitor.oom_pending)
""")

    assert (0, "0 True\n") == (done.returncode, done.stdout), done.stderr
