"""The setting `history` on PyTorch's real allocator: the lines in the report, and no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

from torchmem.allocator.lines import Lines
from torchmem.allocator.oom_report import decode
from torchmem.sample.run_directory import REPORT_SUFFIX

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
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()
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
    """Runs a script on a card of 4 GiB with a setting; returns the script and its output."""

    def run_one(body: str, setting: str) -> tuple[Path, list[str]]:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE.replace("HISTORY", setting) + body)
        own = {
            "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
            "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
        }
        done = run_on_phantom(script, memory="4GiB", environment=own)
        assert 0 == done.returncode, done.stderr
        return script, done.stdout.splitlines()

    return run_one


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

    assert ["0"] == output
    assert (str(script), leak) == (lines.held[0].frame.file, lines.held[0].frame.line)
    assert (str(script), leak) == (lines.grown[0].frame.file, lines.grown[0].frame.line)
    assert lines.grown_steps > 0
    if setting == "True":
        assert lines.held[0].bytes > 10 * lines.unknown_bytes


def test_without_the_setting_nothing_is_recorded(run: Run, tmp_path: Path) -> None:
    """The report has no lines."""
    run(LEAK, "False")
    (path,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")

    assert decode(path.read_bytes()).lines is None


@pytest.mark.parametrize("setting", ['"oom"', "True"])
def test_the_scripts_own_recording_stays(run: Run, setting: str) -> None:
    """A recording that the script started before or meanwhile keeps its entries, to the end."""
    assert ["True True"] == run(OWN, setting)[1]


def test_a_recording_that_the_script_starts_later(run: Run) -> None:
    """The script's recording takes the place of the SDK's, and the SDK does not stop it."""
    assert ["True 1", "True True"] == run(TAKEN_OVER, '"oom"')[1]


def test_it_is_recorded_only_while_it_matters(run: Run) -> None:
    """While there is room, and after the session's end, nothing is recorded."""
    assert ["False", "True", "False"] == run(ROOM, '"oom"')[1]
