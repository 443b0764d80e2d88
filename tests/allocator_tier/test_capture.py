"""Capture and release on PyTorch's real allocator, with an unchanged training script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.phantom import run_on_phantom, torch_server
from support.snapshots import load_snapshot
from support.waiting import until

from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    REQUEST_SUFFIX,
    CaptureRequest,
    decode_answer,
)
from torchmem.sample.process_messages import encode, sibling_path
from torchmem.sample.run_directory import SAMPLE_SUFFIX

pytestmark = pytest.mark.allocator

PRELUDE = "import os, sys, time, torch\nfrom torchmem import sdk\n"
STEP = """
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def forward_and_backward():
    model(torch.randn(64, 512, device="cuda")).sum().backward()
def step():
    forward_and_backward(); optimizer.step(); optimizer.zero_grad()
"""
SCRIPT = f"""{PRELUDE}{STEP}
session = sdk.instrument(interval=0.02)
{{before}}
while not os.path.exists("stop"):
    step(); time.sleep(0.005)
# The SDK records a step of its own from time to time, until a later step ends.
for _ in range(100):
    if torch._C._cuda_isHistoryEnabled(): step()
print(sum(session.errors.counts.values()), torch._C._cuda_isHistoryEnabled(), {{after}})
"""
Train = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """GPUs and a run directory that belong to this test."""
    own = {
        "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
        "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
    }
    return os.environ | own


@pytest.fixture
def start(phantom: list[str], environment: dict[str, str], tmp_path: Path) -> Iterator[Train]:
    """Starts the training script on a phantom GPU; it runs until a file `stop` appears."""
    started: list[subprocess.Popen[str]] = []

    def start_one(before: str = "", after: str = "None") -> subprocess.Popen[str]:
        script = tmp_path / "training_script.py"
        script.write_text(SCRIPT.format(before=before, after=after))
        command = [*phantom, *torch_server().python(), str(script)]
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
            )
        )
        until(lambda: list((tmp_path / "run").rglob(f"*{SAMPLE_SUFFIX}")))
        return started[-1]

    yield start_one
    for process in started:
        process.terminate()
        process.communicate()


@pytest.fixture
def phantom() -> list[str]:
    """The prefix that runs a command on a GPU of 4 GiB."""
    return [sys.executable, "-m", "torchmem.phantom", "--memory", "4GiB", "--"]


@pytest.fixture
def capture(
    environment: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `torchmem capture`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchmem.cli", "capture", *arguments]
        return subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


def stop(process: subprocess.Popen[str], folder: Path) -> str:
    """End the training and return its output."""
    (folder / "stop").touch()
    return process.communicate(timeout=600)[0]


def frames(entry: dict[str, Any]) -> list[str]:
    """Return the names of the functions on an entry's stack."""
    return [frame["name"] for frame in entry["frames"]]


def test_a_snapshot_of_a_running_training(start: Train, capture: Any, tmp_path: Path) -> None:
    """The file has builtins only, starts with a step, and names the script's own lines."""
    process = start()
    done = capture("--rank", "0", "--seconds", "2", "--out", "taken.pickle")

    assert done.returncode == 0, done.stderr
    snapshot = load_snapshot(tmp_path / "taken.pickle")
    (trace,) = snapshot["device_traces"]
    allocations = [entry for entry in trace if entry["action"] == "alloc"]
    assert len(allocations) > 30
    assert frames(allocations[0])[:2] == ["forward_and_backward", "step"]
    assert any(
        frame["filename"].endswith("training_script.py") for frame in allocations[0]["frames"]
    )
    assert sum(segment["total_size"] for segment in snapshot["segments"]) > 0
    assert stop(process, tmp_path) == "0 False None\n"


def test_overwritten_entries_are_told(start: Train, capture: Any, tmp_path: Path) -> None:
    """The file has as many entries as asked for, and the command says what they span."""
    process = start()
    done = capture("--seconds", "1", "--max-entries", "50", "--out", "taken.pickle")
    (trace,) = load_snapshot(tmp_path / "taken.pickle")["device_traces"]

    assert len(trace) == 50
    assert re.search(
        r"lacks the oldest entries, because a GPU had more than 50; it has the last \S+ s\. Use a "
        r"larger --max-entries",
        done.stderr,
    )
    stop(process, tmp_path)


def test_a_script_that_records_keeps_its_recording(
    start: Train, capture: Any, tmp_path: Path
) -> None:
    """The request is refused with the reason, and the script's own trace stays complete."""
    mine = "torch.cuda.memory._record_memory_history(); marked = torch.zeros(12345, device='cuda')"
    entries = "any(e['size'] == 49380 for e in torch.cuda.memory._snapshot()['device_traces'][0])"
    process = start(before=mine, after=entries)
    done = capture("--seconds", "0.1")

    assert (done.returncode, "is being recorded already" in done.stderr) == (2, True), done.stderr
    assert stop(process, tmp_path) == "0 True True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_request_is_refused(start: Train, tmp_path: Path) -> None:
    """A request by neither the process's user nor root is refused, and nothing is recorded."""
    process = start()
    (sample,) = (tmp_path / "run").rglob(f"*{SAMPLE_SUFFIX}")
    request = tmp_path / "request"
    request.write_bytes(encode(CaptureRequest(0.1)))
    os.chown(request, 1234, 1234)
    request.rename(sibling_path(sample, REQUEST_SUFFIX))
    until(sibling_path(sample, ANSWER_SUFFIX).exists)
    answer = decode_answer(sibling_path(sample, ANSWER_SUFFIX).read_bytes())

    assert (answer.state, "user 1234's" in str(answer.reason)) == ("refused", True)
    assert stop(process, tmp_path) == "0 False None\n"


def test_a_snapshot_at_an_oom(environment: dict[str, str], tmp_path: Path) -> None:
    """With `capture_on_oom` the state at the OOM is a memory_viz file; the error is unchanged."""
    script = f"""{PRELUDE}
session = sdk.instrument(capture_on_oom=True)
held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.zeros(5 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("caught", sum(session.errors.counts.values()))
"""
    done = run_on_phantom("-c", script, memory="4GiB", environment=environment)

    assert (done.returncode, done.stdout) == (0, "caught 0\n"), done.stderr
    (path,) = (tmp_path / "run").rglob("*.oom.snapshot.pickle")
    snapshot = load_snapshot(path)
    assert [segment["total_size"] for segment in snapshot["segments"]] == [64 << 20]
    assert sum(len(trace) for trace in snapshot["device_traces"]) == 0


RELEASE = f"""{PRELUDE}
emptied = []
original = torch.cuda.empty_cache
def empty_cache():
    import traceback
    emptied.append("at_step" in [frame.name for frame in traceback.extract_stack()])
    original()
torch.cuda.empty_cache = empty_cache
session = sdk.instrument(interval=1e-6, release={{release}}, release_interval=1e-6)
weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for mib in [3200] + [10] * 6:
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
print(emptied, torch.cuda.memory_reserved() >> 20, torch.cuda.max_memory_allocated() >> 20)
"""


@pytest.mark.parametrize(
    ("release", "printed"), [("0.5", "[True] 12 3200"), ("None", "[] 3202 3200")], ids=["on", "off"]
)
def test_the_cache_is_released_only_if_enabled(
    environment: dict[str, str], release: str, printed: str
) -> None:
    """After a large phase the cache is released once, in the step hook; by default never."""
    done = run_on_phantom(
        "-c", RELEASE.format(release=release), memory="4GiB", environment=environment
    )

    assert (0, printed + "\n") == (done.returncode, done.stdout), done.stderr


def test_a_release_never_breaks_a_graph_capture(environment: dict[str, str]) -> None:
    """During the capture of a CUDA graph nothing is released; afterwards it is."""
    script = f"""{PRELUDE}
session = sdk.instrument(interval=1e-6, release=0.5, release_interval=1e-6)
weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.grad = torch.ones_like(weight)
optimizer.step()
large = torch.empty(3200 << 20, dtype=torch.uint8, device="cuda")
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    del large
    for _ in range(6):
        optimizer.step()
    print(torch.cuda.memory_reserved() >> 30)
optimizer.step()
print(torch.cuda.memory_reserved() >> 30, sum(session.errors.counts.values()))
"""
    done = run_on_phantom("-c", script, memory="4GiB", environment=environment)

    assert (done.returncode, done.stdout) == (0, "3\n0 0\n"), done.stderr
