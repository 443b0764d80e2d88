"""The core of the allocator tier, in any Python with any PyTorch: --interpreter PYTHON.

The interpreter needs the CUDA build of PyTorch, and torchmem with the exporter's extra. What a
version of PyTorch lacks is skipped, with the version that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from docs.generate.versions import minor, order
from support.phantom import SCRIPT_MEMORY, phantom_variables, run_on_phantom
from support.snapshots import load_snapshot
from support.waiting import until

from torchmem.explain.oom_report import decode
from torchmem.phantom.torch_build import find_torch
from torchmem.sample.run_directory import REPORT_SUFFIX, SAMPLE_SUFFIX
from torchmem.sdk.pytorch.private_calls import PRIVATE_CALLS

pytestmark = pytest.mark.versions

PRIVATE = Path(__file__).parents[1] / "allocator_tier" / "private_calls.py"
# With PyTorch 2.3, importing torch._dynamo reads the GPU, so forks have the memory of their parent.
MEMORY = SCRIPT_MEMORY
STEPS = 300
PRELUDE = """
import os, sys, time, torch
from torchmem import sdk
def take(mib): return torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
def build():
    global model, optimizer
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.randn(64, 300, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ALWAYS = "session = sdk.instrument(interval=1e-6, snapshot_interval=1e-6, snapshot_budget=1.0)\n"
NO_ERRORS = "assert not sum(session.errors.counts.values()), session.errors.counts\n"
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
Sample = Callable[[], dict[str, Any]]


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    """Return the interpreter; skip without the CUDA build of PyTorch."""
    path: str = request.config.getoption("--interpreter", None) or sys.executable
    build = find_torch(path, os.environ)
    if build is None or build.cuda is None:
        pytest.skip(f"{path} does not have the CUDA build of PyTorch; run make test-versions")
    return path


@pytest.fixture(scope="session")
def torch(python: str) -> tuple[int, ...]:
    """Return the minor version of PyTorch."""
    build = find_torch(python, os.environ)
    assert build is not None
    return order(minor(build.version))


@pytest.fixture
def needs(torch: tuple[int, ...]) -> Callable[[str], None]:
    """Skips a test on a PyTorch that is older than a version."""

    def check(version: str) -> None:
        if torch < order(version):
            pytest.skip(f"needs PyTorch {version}")

    return check


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """A run directory and GPUs that belong to this test."""
    return {
        "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
        "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
    }


@pytest.fixture
def run(python: str, own: dict[str, str], tmp_path: Path) -> Run:
    """Runs a script after the prelude, in a fork of a process that has imported torch."""

    def run_one(body: str, exit_code: int = 0, **variables: str) -> Done:
        path = tmp_path / "train.py"
        path.write_text(PRELUDE + body)
        done = run_on_phantom(
            path, memory=MEMORY, environment=own | variables, folder=tmp_path, python=python
        )
        assert exit_code == done.returncode, (done.returncode, done.stdout, done.stderr)
        return done

    return run_one


@pytest.fixture
def started(python: str, own: dict[str, str], tmp_path: Path) -> Callable[..., Any]:
    """Starts `python ARGUMENTS` on the GPUs, as a process that is not a fork."""
    variables = os.environ | phantom_variables(MEMORY, 1, python) | own

    def start(*arguments: str | Path, **others: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python, "-W", "ignore", *map(str, arguments)],
            env=variables | others,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture
def ended(started: Callable[..., Any]) -> Run:
    """Runs `python ARGUMENTS` to its end."""

    def end(*arguments: str | Path, **others: str) -> Done:
        process = started(*arguments, **others)
        output, errors = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return end


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """Returns what the only process has published."""

    def read() -> dict[str, Any]:
        (path,) = (tmp_path / "run").rglob(f"*{SAMPLE_SUFFIX}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    return read


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"], ids=["default", "expandable"])
def test_loop(run: Run, sample: Sample, conf: str) -> None:
    """With one line a training loop publishes its steps and PyTorch's own peak, and ends as ever.

    The first step is recorded where PyTorch can leave traces out.
    """
    done = run(
        f"sdk.instrument(); build()\nfor _ in range({STEPS}): step()\n"
        "print(torch.cuda.max_memory_allocated())",
        PYTORCH_CUDA_ALLOC_CONF=conf,
    )
    (device,) = sample()["devices"]

    assert done.stderr == ""
    assert (sample()["steps"]["count"], sample()["ended"]) == (STEPS, "exited")
    assert int(done.stdout) == device["allocator"]["allocated_peak_bytes"]


def test_snapshots(run: Run, sample: Sample) -> None:
    """Thousands of snapshots leave the process alive, its counts of references, and no error."""
    run(
        f"{ALWAYS}build()\nbefore = sys.getrefcount(False), sys.getrefcount(True)\n"
        f"for _ in range(5 * {STEPS}): step()\n"
        "now = sys.getrefcount(False), sys.getrefcount(True)\n"
        f"assert all(abs(a - b) < {STEPS} for a, b in zip(now, before)), (now, before)\n{NO_ERRORS}"
    )
    (device,) = sample()["devices"]

    assert device["layout"]["segments"]["small"] > 0


def test_components(run: Run, sample: Sample) -> None:
    """What holds the memory adds up to the allocated bytes, parameters to their number."""
    done = run(
        f"{ALWAYS}build()\nfor _ in range(5): step()\n{NO_ERRORS}"
        "print(sum(each.numel() * 4 for each in model.parameters()))"
    )
    (device,) = sample()["devices"]
    components = device["components"]

    assert int(done.stdout) == components["parameters"] == components["optimizer_state"] // 2
    allocated = device["allocator"]["allocated_bytes"]
    assert allocated["small"] + allocated["large"] == sum(components.values())


def test_recorded_step(run: Run, sample: Sample, needs: Callable[[str], None]) -> None:
    """A recorded step tells the components of the peak, which add up, and its recording ends."""
    needs("2.11")
    run(
        f"{ALWAYS}build()\nfor _ in range(5): step()\n{NO_ERRORS}"
        "assert not torch._C._cuda_isHistoryEnabled()"
    )
    (device,) = sample()["devices"]
    peaks = device["component_peaks"]

    assert peaks["parameters"] >= peaks["gradients"] > 0
    assert device["allocator"]["allocated_peak_bytes"] == sum(peaks.values())


def test_history_recording(run: Run) -> None:
    """A recording that the script starts while the SDK records is the script's, to the end."""
    run(
        f"{ALWAYS}build(); step()\n"
        "torch.cuda.memory._record_memory_history(context=None)\n"
        f"for _ in range(5): step()\n{NO_ERRORS}session.close()\n"
        "assert torch._C._cuda_isHistoryEnabled()\n"
        "assert len(torch.cuda.memory._snapshot()['device_traces'][0]) > 100"
    )


def test_private_calls(python: str, torch: tuple[int, ...], own: dict[str, str]) -> None:
    """PyTorch has the private functions that the SDK's table says, and none loses a reference."""
    done = run_on_phantom(PRIVATE, memory=MEMORY, environment=own, python=python)
    assert done.returncode == 0, (done.returncode, done.stderr)
    lost = json.loads(done.stdout.splitlines()[-1])
    newest = "999.0"

    assert {name: changes for name, changes in lost.items() if changes} == {}
    assert {
        call.name
        for call in PRIVATE_CALLS
        if order(call.since) <= torch <= order(call.until or newest)
    } == {name for name, changes in lost.items() if changes is not None}


def test_oom(run: Run, ended: Run, tmp_path: Path) -> None:
    """An OutOfMemoryError reaches the script, and leaves a report with the cause and the line."""
    run(
        f"{ALWAYS}held = [take(4000) for _ in range(3)]\n"
        "try: take(4000)\nexcept torch.cuda.OutOfMemoryError: print('caught')\n"
        f"else: sys.exit('it fitted')\n{NO_ERRORS}"
    )
    (path,) = (tmp_path / "run").rglob(f"*{REPORT_SUFFIX}")
    shown = ended("-m", "torchmem.cli", "why")

    assert (
        decode(path.read_bytes()).oom.cause,
        decode(path.read_bytes()).oom.requested_bytes,
    ) == ("capacity", 4000 << 20)
    assert (shown.returncode, "train.py" in shown.stdout) == (0, True), shown


def test_capture(started: Callable[..., Any], ended: Run, tmp_path: Path) -> None:
    """`torchmem capture` takes a trace of a running training, which goes on without recording."""
    script = tmp_path / "train.py"
    script.write_text(
        PRELUDE + "session = sdk.instrument(interval=0.02); build()\n"
        "while not os.path.exists('stop'): step(); time.sleep(0.005)\n"
        "# The SDK records a step of its own from time to time, until a later step ends.\n"
        "for _ in range(100):\n    if torch._C._cuda_isHistoryEnabled(): step()\n"
        f"{NO_ERRORS}print(torch._C._cuda_isHistoryEnabled())"
    )
    training = started(script)
    until(lambda: training.poll() is not None or [*tmp_path.rglob(f"*{SAMPLE_SUFFIX}")])
    done = ended("-m", "torchmem.cli", "capture", "--seconds", "1", "--out", "taken.pickle")
    (tmp_path / "stop").touch()

    assert training.communicate(timeout=600) == ("False\n", "")
    assert done.returncode == 0, done.stderr
    (trace,) = load_snapshot(tmp_path / "taken.pickle")["device_traces"]
    frames = [frame for entry in trace for frame in entry.get("frames", ())]
    assert any(frame["filename"] == str(script) for frame in frames)


def test_history(run: Run, tmp_path: Path) -> None:
    """With `history` the report of an OOM names the line that held the most memory."""
    body = """
session = sdk.instrument(history=True); build(); kept = []
try:
    while True:
        step()
        kept.append(torch.empty(400 << 20, dtype=torch.uint8, device="cuda"))  # LEAK
except torch.cuda.OutOfMemoryError: pass
"""
    run(body + NO_ERRORS)
    (path,) = (tmp_path / "run").rglob(f"*{REPORT_SUFFIX}")
    lines = decode(path.read_bytes()).lines
    script = tmp_path / "train.py"
    leak = 1 + script.read_text().split("# LEAK")[0].count("\n")

    assert lines is not None
    assert (str(script), leak) == (lines.held[0].frame.file, lines.held[0].frame.line)


def test_whatif(run: Run, ended: Run) -> None:
    """Of a trace by PyTorch, `torchmem whatif` reproduces every allocation."""
    run("""
torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
held = []
for index in range(400):
    held.append(take(1 + index % 37))
    if index % 3: del held[index % len(held)]
torch.cuda.memory._dump_snapshot("snapshot.pickle")
""")
    done = ended("-m", "torchmem.cli", "whatif", "snapshot.pickle", "--gpu-model", "80GB", "--json")

    assert done.stdout, done.stderr
    fidelity = json.loads(done.stdout.splitlines()[0])["fidelity"]
    assert (fidelity["allocations"], fidelity["share"]) == (400, 1.0)


FOREIGN = """
import torch
torch.cuda.memory._record_memory_history(max_entries=10**5, stacks="python")
held = []
for number in range(120):
    held.append(torch.empty((8, 12)[number % 2] << 20, dtype=torch.uint8, device="cuda"))  # HELD
del held[::2]
with torch.profiler.record_function("last"):
    try: torch.empty(64 << 30, dtype=torch.uint8, device="cuda")  # FAILED
    except torch.cuda.OutOfMemoryError: pass
torch.cuda.memory._dump_snapshot("theirs.pickle")
"""


def test_snapshot_of_a_program_without_torchmem(ended: Run, tmp_path: Path) -> None:
    """`torchmem why` explains a dump: lines, what is stranded beside which, and the request."""
    (tmp_path / "theirs.py").write_text(FOREIGN)
    done = ended("theirs.py")
    assert done.returncode == 0, done.stderr
    answer = json.loads(ended("-m", "torchmem.cli", "why", "theirs.pickle", "--json").stdout)
    failed, held = (
        FOREIGN.split(mark, maxsplit=1)[0].count("\n") + 1 for mark in ("# FAILED", "# HELD")
    )

    assert (answer["at"], answer["request"]["line"], answer["bytes"]) == ("oom", failed, 720 << 20)
    assert [(row["line"], row["bytes"]) for row in answer["by_line"]] == [(held, 720 << 20)]
    memory = answer["memory"]
    assert memory["failed"]["cause"] == "capacity"
    assert (memory["in_use_bytes"], memory["stranded_bytes"]) == (720 << 20, 480 << 20)
    assert {(row["line"], row["bytes"]) for row in memory["beside"]} == {(held, 480 << 20)}
    assert [entry["action"] for entry in answer["last_entries"]].count("free") > 0
    assert answer["settings"]["decision"] in {"keep", "change"}


RELEASING = """
session = sdk.instrument(interval=1e-6, release={!r}, release_interval=1e-6)
weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for mib in [12800] + [10] * 6:
    take(mib)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
print(torch.cuda.memory_reserved() >> 20)
"""


@pytest.mark.parametrize(("setting", "reserved"), [("cache=0.5", 12), (None, 12802)])
def test_release(run: Run, setting: str | None, reserved: int) -> None:
    """The cache goes back to the driver if the setting asks for it, and stays otherwise."""
    assert run(RELEASING.format(setting) + NO_ERRORS).stdout == f"{reserved}\n"


def test_crash(run: Run, sample: Sample) -> None:
    """An uncaught exception ends the script as ever, and its rank as `failed`."""
    done = run(f"{ALWAYS}build(); step()\nraise ValueError('mine')", exit_code=1)

    assert done.stderr.endswith("\nValueError: mine\n")
    assert "torchmem" not in done.stderr
    assert sample()["ended"] == "failed"


TIMEOUTS = """
import signal, threading
def fail(*_): raise TimeoutError
signal.signal(signal.SIGALRM, fail)
build()
for number in range(4000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-5 + number % 100 * 7e-6)
        while True:
            session.step()
    except TimeoutError:
        pass
other = threading.Thread(target=session.step, daemon=True)
other.start()
other.join(30)
print(other.is_alive())
"""


def test_timeouts(run: Run) -> None:
    """Timeouts of the script within the SDK's code leave no lock held, for which a thread waits."""
    assert run(ALWAYS + TIMEOUTS).stdout == "False\n"


LOADER = """
held = take(32)
time.sleep(0.1)
loader = torch.utils.data.DataLoader(
    torch.arange(64), num_workers=2, batch_size=8, multiprocessing_context="{}"
)
print(sum(len(batch) for _ in range(2) for batch in loader))
"""


def check_loader(done: Done, sample: Sample) -> None:
    """Check that a data loader gave everything, and what its workers left in the sample."""
    (device,) = sample()["devices"]

    assert (done.stdout, done.stderr) == ("128\n", "")
    assert device["allocator"]["allocated_peak_bytes"] == 32 << 20


CTRL_C = """
from torchmem.sdk.safety.main_thread import PendingCalls
calls, ended = PendingCalls(lambda entry: entry), []
def must_not_raise():
    if not ended:
        calls.raise_after(KeyboardInterrupt(), must_not_raise.__code__)
    for _ in range(1000):
        pass
    ended.append(True)
try:
    for _ in range(1000):
        must_not_raise()
except KeyboardInterrupt:
    print(len(ended))
"""


def test_ctrl_c(run: Run) -> None:
    """Ctrl-C in a callback that must not raise is raised right after it, however long it takes."""
    assert run(CTRL_C).stdout == "1\n"


def test_fork(run: Run, sample: Sample) -> None:
    """Forked workers of a data loader neither hang nor publish."""
    check_loader(run(ALWAYS + LOADER.format("fork")), sample)


def test_forkserver(ended: Run, sample: Sample, tmp_path: Path) -> None:
    """Neither do workers of a fork server, the default since Python 3.14, which import the script.

    They instrument themselves too, but have no GPU.
    """
    script = tmp_path / "train.py"
    guarded = "if __name__ == '__main__':" + indent(LOADER.format("forkserver"), "    ")
    script.write_text(PRELUDE + ALWAYS + guarded)
    check_loader(ended(script), sample)


UNCHANGED = f"""
import torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({STEPS}):
    model(torch.ones(4, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_run(python: str, ended: Run, sample: Sample) -> None:
    """`torchmem run` monitors an unchanged script, and the exporter shows its numbers."""
    done = ended("-m", "torchmem.cli", "run", "--", python, "-W", "ignore", "-c", UNCHANGED)
    shown = ended("-m", "torchmem.cli", "exporter", "--once")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (sample()["steps"]["count"], sample()["ended"]) == (STEPS, "exited")
    series = [line for line in shown.stdout.splitlines() if line.startswith("torchmem_steps_total")]
    assert [str(float(STEPS))] == [line.split()[-1] for line in series], shown


def test_variable_and_exit(ended: Run, sample: Sample) -> None:
    """With TORCHMEM=1 alone a script is monitored, and ends cleanly while snapshots are taken."""
    settings = {"TORCHMEM_SNAPSHOT_INTERVAL": "1e-6", "TORCHMEM_SNAPSHOT_BUDGET": "1"}
    done = ended("-c", f"{UNCHANGED}raise SystemExit(7)", TORCHMEM="1", **settings)

    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert (sample()["steps"]["count"], sample()["ended"]) == (STEPS, "exited")


MODULES = """
import importlib, pkgutil, torchmem
for module in pkgutil.walk_packages(torchmem.__path__, "torchmem."):
    if not module.name.startswith("torchmem.integrations.") and "__main__" not in module.name:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # Of other extras, and of pytest for its plugin.
            others = {"opentelemetry", "grpc", "google", "mcp", "pytest", "_pytest"}
            if error.name.partition(".")[0] not in others: raise
"""


def test_modules(run: Run) -> None:
    """Every module can be imported, except the integrations and those of other extras."""
    assert run(MODULES).stderr == ""
