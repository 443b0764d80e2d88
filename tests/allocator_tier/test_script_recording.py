"""A memory history that the script records itself, while the SDK records steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

# The SDK's first recording begins at the end of the first step and ends at that of the second.
SCRIPT = """
import sys, torch
mode, place, is_monitored = sys.argv[1:]
record = torch.cuda.memory._record_memory_history
if is_monitored == "True":
    from torchmem import sdk
    session = sdk.instrument()
modes = {
    "default": record,
    "state": lambda: record(context="state", max_entries=10_000),
    "none": lambda: record(context=None),
    "stacks": lambda: record(enabled="state", context="state"),
    "legacy": lambda: record(True, trace_alloc_max_entries=10_000),
    "skipped": lambda: record(
        context=None, skip_actions=["free_requested", "segment_alloc", "segment_free", "snapshot"]
    ),
    "stopped": lambda: record(enabled=None),
}
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
native = torch._C._cuda_record_memory_history
for step in range(6):
    if step == 1 and place == "forward":
        modes[mode]()
    model(torch.ones(32, 64, device="cuda")).sum().backward()
    if step == 1 and place == "backward":
        modes[mode]()
    optimizer.step()
    optimizer.zero_grad()
if is_monitored == "True":
    session.close()
trace = torch.cuda.memory._snapshot()["device_traces"][0]
print(torch._C._cuda_isHistoryEnabled(), torch._C._cuda_record_memory_history is native)
entries = [(entry["action"], entry["size"], "frames" in entry) for entry in trace]
print([entry for entry in entries if entry[0] != "snapshot"])
"""
CASES = [
    *((mode, "forward") for mode in ("state", "none", "stacks", "legacy", "skipped", "stopped")),
    *((mode, "backward") for mode in ("default", "none")),
]


@pytest.mark.parametrize(("mode", "place"), CASES)
def test_the_scripts_recording_is_as_without_the_sdk(tmp_path: Path, mode: str, place: str) -> None:
    """Whatever it records, it has the same entries, with stacks or not, and is not stopped.

    Only PyTorch's entries for the SDK's own snapshots are added.
    """
    plain, monitored = (_output(tmp_path, mode, place, flag) for flag in ("False", "True"))

    assert plain == monitored
    assert ("True True" if mode != "stopped" else "False True") == plain.splitlines()[0]
    assert len(plain.splitlines()[1]) > 100 or mode in ("stacks", "stopped")


def _output(folder: Path, *arguments: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = run_on_phantom(
        script,
        *arguments,
        memory="4GiB",
        state=folder,
        environment={"TORCHMEM_RUN_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
