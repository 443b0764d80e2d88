"""The setting `history` on PyTorch's real allocator: the lines in the report, and no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

from torchmem.explain.lines import Lines
from torchmem.explain.oom_report import OomReport, decode
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.trace.recorded_leaks import recorded_leaks

pytestmark = pytest.mark.allocator

PRELUDE = """
import sys, time, torch
from torchmem import sdk
session = sdk.instrument(
    interval=0.02, snapshot_interval=0.02, snapshot_budget=1.0, history=HISTORY
)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
history = torch.cuda.memory._record_memory_history
is_recording = torch._C._cuda_isHistoryEnabled
kept = []
def log(x):
    kept.append(x * 2)  # LEAK
def step():
    x = torch.ones(4096, 512, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return x
def steps(seconds):
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end or number < 30:  # however few a busy machine makes in that time
        step()
        number += 1
"""
LEAK = """
try:
    while True:
        log(step())
        time.sleep(0.01)
except torch.OutOfMemoryError:
    pass
print(sum(session.errors.counts.values()))
"""
SHORT = """
import sys, time, torch
from torchmem import sdk
session = sdk.instrument(history="oom")
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
def log(x):
    kept.append(x * 2)  # LEAK
while True:
    optimizer.zero_grad()
    started = time.monotonic()
    x = torch.ones(MIB, 1 << 18, device="cuda")
    model(x[0, :256]).sum().backward()
    log(x)
    optimizer.step()
    time.sleep(max(0, started + SECONDS - time.monotonic()))
"""
KEPT = """
import time, torch
from torchmem import sdk
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1, self.linear2 = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)
    def forward(self, x):
        x = self.linear1(x)
        return self.linear2(x.relu())  # KEPT
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
class Odd(torch.Tensor):
    def __getattribute__(self, name):
        raise AssertionError(name)
session = sdk.instrument(SETTINGS)
model = Model().cuda()
odd = torch.ones(1 << 20, device="cuda").as_subclass(Odd)
total = 0
def main():
    global total
    while True:
        loss = model(torch.ones(8192, 64, device="cuda")).sum()
        total = total + loss
        session.step()
        time.sleep(0.005)
try:
    main()
finally:
    print(sum(session.errors.counts.values()))
"""
HEALTHY = """
import os, random, time, torch
from torchmem import sdk
session = sdk.instrument(history="oom")
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
generator = random.Random(SEED)
start, starts = torch.cuda.memory._record_memory_history, 0
def count(enabled="all", *arguments, **keywords):
    global starts
    starts += enabled == "state"
    return start(enabled, *arguments, **keywords)
torch.cuda.memory._record_memory_history = count
for number in range(STEPS):
    length = generator.randint(1, 4096)
    model(torch.ones(length, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.002)
print(starts)
"""
OWN = """
history(stacks="python", max_entries=1000)
held = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.9), dtype=torch.uint8, device="cuda")
steps(1)
session.close()
trace = torch.cuda.memory._snapshot()["device_traces"][0]
print(is_recording(), len(trace) > 100)
"""
TAKEN_OVER = """
held = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.9), dtype=torch.uint8, device="cuda")
steps(1)
print(is_recording(), len(torch.cuda.memory._snapshot()["device_traces"][0]))
history(stacks="python", max_entries=1000)
step()
session.close()
print(is_recording(), len(torch.cuda.memory._snapshot()["device_traces"][0]) > 10)
"""
ROOM = """
steps(1)
print(is_recording())
held = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.95), dtype=torch.uint8, device="cuda")
steps(1)
print(is_recording())
session.close()
print(is_recording())
"""
Run = Callable[[str, str], tuple[Path, list[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script on a GPU of 4 GiB with a setting; returns the script and its output."""

    def run_one(body: str, setting: str) -> tuple[Path, list[str]]:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE.replace("HISTORY", setting) + body)
        done = run_on_phantom(script, memory="4GiB", environment=_own(tmp_path))
        assert done.returncode == 0, done.stderr
        return script, done.stdout.splitlines()

    return run_one


def _own(folder: Path) -> dict[str, str]:
    names = {"TORCHMEM_RUN_DIR": "run", "PHANTOM_STATE_DIR": "phantom"}
    return {name: str(folder / own) for name, own in names.items()}


def _lines(folder: Path) -> Lines:
    (path,) = folder.rglob(f"*{REPORT_SUFFIX}")
    lines = decode(path.read_bytes()).lines
    assert lines is not None
    return lines


@pytest.mark.parametrize("setting", ['"oom"', "True"])
def test_the_line_that_leaks(run: Run, tmp_path: Path, setting: str) -> None:
    """It holds the most of what was recorded, and has grown most; with true it has nearly all."""
    script, output = run(LEAK, setting)
    lines, leak = _lines(tmp_path), script.read_text().split("# LEAK")[0].count("\n") + 1

    assert output == ["0"]
    assert (str(script), leak) == (lines.held[0].frame.file, lines.held[0].frame.line)
    assert (str(script), leak) == (lines.grown[0].frame.file, lines.grown[0].frame.line)
    assert lines.grown_steps > 0
    if setting == "True":
        assert lines.held[0].bytes > 10 * lines.unknown_bytes


@pytest.mark.parametrize("mib", [16, 85])
def test_the_line_that_leaks_in_a_job_of_seconds(tmp_path: Path, mib: int) -> None:
    """A leak that fills the GPU within 40 or 220 steps of 5 ms has its line, which grew most."""
    script = tmp_path / "train.py"
    script.write_text(SHORT.replace("MIB", str(mib)).replace("SECONDS", "0.005"))
    done = run_on_phantom(script, memory="3482MiB", environment=_own(tmp_path))
    leak = script.read_text().split("# LEAK")[0].count("\n") + 1
    lines = _lines(tmp_path)

    assert "OutOfMemoryError" in done.stderr
    assert (str(script), leak) == (lines.grown[0].frame.file, lines.grown[0].frame.line)
    assert lines.grown[0].blocks == lines.grown_steps > 10


def _report(folder: Path, settings: str) -> tuple[str, OomReport]:
    script = folder / "train.py"
    script.write_text(KEPT.replace("SETTINGS", settings))
    done = run_on_phantom(script, memory="3482MiB", environment=_own(folder))
    (path,) = folder.rglob(f"*{REPORT_SUFFIX}")
    assert done.stdout.strip() == "0", done.stderr
    assert "OutOfMemoryError" in done.stderr
    return script.read_text(), decode(path.read_bytes())


def test_the_module_and_the_callers_of_a_line(tmp_path: Path) -> None:
    """A line of `forward` that keeps memory stands with its modules, and with who called them.

    The job has no optimizer, so only the points of the run's history show its growth.
    """
    text, report = _report(tmp_path, 'history="oom"')
    assert report.lines is not None
    grown, line = report.lines.grown[0], text.split("# KEPT")[0].count("\n") + 1
    part = grown.parts[0]

    assert line == grown.frame.line
    assert [each.module for each in grown.parts] == ["layers.*", "layers.*.linear2"]
    assert [frame.function for frame in part.callers] == ["forward", "main", "<module>"]


@pytest.mark.parametrize("settings", ["", 'history="oom"'])
def test_what_the_tensors_are(tmp_path: Path, settings: str) -> None:
    """A process that dies of an OOM leaves the shapes of its tensors, and runs no code of them."""
    _, report = _report(tmp_path, settings)
    largest, allocator = report.tensors[0], report.device.allocator

    assert allocator is not None
    assert (largest.shape, largest.dtype) == ((8192, 512), "float32")
    assert largest.bytes == largest.count * (8192 * 512 * 4) > allocator.allocated_bytes.total / 2


def test_a_recording_with_stacks_names_the_line_that_leaks(tmp_path: Path) -> None:
    """With `capture_on_oom="trace"` and `history=True` the recording has stacks."""
    text, report = _report(tmp_path, 'history=True, capture_on_oom="trace"')
    (path,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")
    leak, *_ = recorded_leaks(path, report)

    assert text.split("# KEPT")[0].count("\n") + 1 == leak.line.line
    assert report.lines is not None
    assert leak.line.line == report.lines.held[0].frame.line


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_job_is_not_recorded(tmp_path: Path, seed: int) -> None:
    """Batches of random lengths start no recording, neither in the first steps nor later."""
    script = tmp_path / "train.py"
    script.write_text(HEALTHY.replace("SEED", str(seed)).replace("STEPS", "600"))
    done = run_on_phantom(script, memory="4GiB", environment=_own(tmp_path))

    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_without_the_setting_nothing_is_recorded(run: Run, tmp_path: Path) -> None:
    """The report has no lines."""
    run(LEAK, "False")
    (path,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")

    assert decode(path.read_bytes()).lines is None


@pytest.mark.parametrize("setting", ['"oom"', "True"])
def test_the_scripts_own_recording_stays(run: Run, setting: str) -> None:
    """A recording that the script started before or meanwhile keeps its entries, to the end."""
    assert run(OWN, setting)[1] == ["True True"]


def test_a_recording_that_the_script_starts_later(run: Run) -> None:
    """The script's recording takes the place of the SDK's, and the SDK does not stop it."""
    assert run(TAKEN_OVER, '"oom"')[1] == ["True 1", "True True"]


def test_it_is_recorded_only_while_it_matters(run: Run) -> None:
    """While there is room, and after the session's end, nothing is recorded."""
    assert run(ROOM, '"oom"')[1] == ["False", "True", "False"]
