"""`torchmem why` on snapshots of PyTorch's real allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.phantom import json_of_script

from torchmem.trace import read_with_stacks
from torchmem.trace.holders import holders
from torchmem.trace.leaks import leaks
from torchmem.trace.lifetimes import Lifetimes
from torchmem.whatif.moment import moment_memory

pytestmark = pytest.mark.allocator

# Every line that allocates on the GPU is marked; the third one keeps what it allocates.
SCRIPT = """
torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
model = torch.nn.Linear(1024, 1024).cuda()  # parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept, requested = [], []
for _ in range(40):
    loss = model(torch.ones(64, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.zeros(1 << 20, device="cuda"))  # kept
    requested.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
torch.cuda.memory._dump_snapshot(sys.argv[1])
try:
    torch.empty(1 << 40, device="cuda")  # failed
except torch.cuda.OutOfMemoryError:
    pass
torch.cuda.memory._dump_snapshot(sys.argv[2])
print(json.dumps(requested))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return the folder with two snapshots, and PyTorch's requested bytes after each step."""
    folder = tmp_path_factory.mktemp("snapshots")
    requested: Any = json_of_script(
        SCRIPT, folder, str(folder / "end.pickle"), str(folder / "oom.pickle")
    )
    return folder, requested


def lifetimes(path: Path) -> Lifetimes:
    """Return the allocations of the only device."""
    [trace] = read_with_stacks(path)
    return Lifetimes.of(trace)


def line_of(mark: str) -> int:
    """Return the line of the marked place in the script, which begins with one import."""
    return 2 + next(n for n, text in enumerate(SCRIPT.splitlines()) if text.endswith(f"# {mark}"))


def test_what_is_in_use_equals_pytorchs_count(recorded: tuple[Path, list[int]]) -> None:
    """The bytes in use at the end are PyTorch's requested bytes, to the byte."""
    folder, requested = recorded
    found = holders(lifetimes(folder / "end.pickle"), "end")

    assert found is not None
    assert requested[-1] == found.size_bytes


def test_lines_are_those_of_the_script(recorded: tuple[Path, list[int]]) -> None:
    """Parameters, and what the loop keeps, belong to the lines that allocated them."""
    found = holders(lifetimes(recorded[0] / "end.pickle"), "end")
    assert found is not None
    by_number = {group.line.line: group for group in found.by_line if group.line}

    assert by_number[line_of("kept")].size_bytes == 40 * (4 << 20)
    assert by_number[line_of("parameters")].size_bytes == 4 * 1024 * 1025


def test_a_leak_and_the_failed_request_are_found(recorded: tuple[Path, list[int]]) -> None:
    """The line that keeps memory is the only leak, and the OOM names the line that asked."""
    [leak] = leaks(lifetimes(recorded[0] / "end.pickle"))
    found = holders(lifetimes(recorded[0] / "oom.pickle"), "oom")

    assert line_of("kept") == leak.line.line
    assert found is not None
    assert found.request is not None
    assert found.request.line is not None
    assert line_of("failed") == found.request.line.line


def test_the_memory_of_a_moment_is_that_of_the_dump(recorded: tuple[Path, list[int]]) -> None:
    """Undoing nothing gives the segments of the file; undoing an OOM gives its state."""
    at_end = lifetimes(recorded[0] / "end.pickle")
    segments = at_end.trace.segments
    found = moment_memory(at_end, at_end.events)
    failed = lifetimes(recorded[0] / "oom.pickle")
    before = moment_memory(failed, failed.moment("oom") or 0)

    assert found is not None
    assert found.reserved == sum(segment.total_size for segment in segments)
    assert found.in_use == sum(
        block.size
        for segment in segments
        for block in segment.blocks
        if block.state == "active_allocated"
    )
    assert before is not None
    assert before.failed is not None
    assert (before.failed.cause, before.in_use) == ("capacity", found.in_use)


def test_ranges_of_record_function_are_named(recorded: tuple[Path, list[int]]) -> None:
    """Each step of the optimizer is one, with a start and an end."""
    trace = lifetimes(recorded[0] / "end.pickle").trace
    names = {trace.texts[each.name] for each in trace.annotations}

    assert "Optimizer.step#SGD.step" in names
    assert sum(each.is_start for each in trace.annotations) == len(trace.annotations) / 2
