"""Every scenario reproduces its published number by the decisions of the allocator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from torchmem import sdk
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.sizes import GIB, MIB
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import Layout
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.gpu import CONTEXT_BYTES, GPU_BYTES, GpuUse, SimulatedGpu
from torchmem.simulator.scenarios import SCENARIOS, SimulatedRank
from torchmem.simulator.scenarios.leak import LEAKED_BYTES
from torchmem.simulator.scenarios.neighbor import NEIGHBOR_BYTES
from torchmem.simulator.scenarios.phase_change import EPOCHS, TRAINED

RANKS = 2
FIRST, LAST = 0, 1
CAUSES = {
    ("fragmentation", LAST): "fragmentation",
    ("leak", FIRST): "capacity",
    ("leak", LAST): "capacity",
    ("imbalanced-ranks", FIRST): "capacity",
    ("neighbor", FIRST): "external",
    ("colocated", LAST): "external",
    ("phase-change", LAST): "fragmentation",
}
"""The ranks that run out of memory, and why."""
RANDOM = {
    "fragmentation",
    "healthy-slack",
    "retry-storm",
    "variable-length",
}
"""Scenarios that use random numbers."""
GB = 10**9


@dataclass(frozen=True)
class Step:
    """The allocator at the end of a step, in bytes; peaks are those of the step."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    retries: int


@dataclass
class Run:
    """The run of one rank: its steps, the measured layouts with their step, and its end."""

    allocator: DeviceCachingAllocator
    steps: list[Step] = field(default_factory=list)
    layouts: list[tuple[int, Layout]] = field(default_factory=list)
    oom: OutOfMemoryDetails | None = None

    @property
    def slack_at_peak(self) -> float:
        """1 - peak allocated / peak reserved bytes."""
        allocated = max(step.allocated_peak for step in self.steps)
        return 1 - allocated / max(step.reserved_peak for step in self.steps)

    def end_step(self) -> None:
        """Record a step, and reset the peaks."""
        stats = self.allocator.memory_stats_as_nested_dict()
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        self.allocator.reset_peak_memory_stats()
        bytes_ = allocated["current"], allocated["peak"], reserved["current"], reserved["peak"]
        self.steps.append(Step(*bytes_, stats["num_alloc_retries"]))

    def measure(self) -> None:
        """Record the layout of the memory."""
        layout = measure(self.allocator.memory_snapshot(), 0, 0.0)
        self.layouts.append((len(self.steps), layout))


def new_allocator(name: str, share: float = 1.0) -> DeviceCachingAllocator:
    """Return the allocator of a process that is alone on a GPU, of which CUDA has `share`."""
    scenario = SCENARIOS[name]
    use = GpuUse([0] * (1 + scenario.neighbors))
    return DeviceCachingAllocator(SimulatedGpu(int(share * scenario.gpu_bytes), use=use))


def play(
    name: str,
    rank: int,
    steps: int,
    *,
    seed: int = 0,
    length: float = 1.2,
    measured_every: int | None = None,
    allocator: DeviceCachingAllocator | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Run one of two ranks for `length` times the steps, or until it runs out of memory."""
    allocator = allocator or new_allocator(name)
    run = Run(allocator)
    simulated = SimulatedRank(allocator, rank, RANKS, steps, seed, allocator.gpu.mem_get_info()[0])
    try:
        for event in SCENARIOS[name].train(simulated):
            if measured_every is not None and len(run.steps) % measured_every == 0:
                run.measure()
            if event == "step":
                on_step()
                run.end_step()
            if len(run.steps) >= length * steps:
                break
    except OutOfMemoryError as error:
        run.oom = error.details
    return run


def test_every_scenario_describes_itself() -> None:
    """A scenario has a name, a summary of one sentence, a number, and the source of the number."""
    for name, scenario in SCENARIOS.items():
        assert name == scenario.name
        assert re.fullmatch(r"[A-Z\d][^.]+\.", scenario.summary.replace("cuda.", ""))
        assert re.search(r"\d|two|twice", scenario.reproduces)
        assert scenario.source
        assert scenario.simulated


@pytest.mark.parametrize(("seed", "share"), [(0, 1.0), (1, 127 / 128), (2, 1.0)])
@pytest.mark.parametrize("rank", [FIRST, LAST])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_named_ranks_run_out_of_memory(
    name: str, rank: int, seed: int, share: float, tmp_path: Path
) -> None:
    """Only the named ranks run out of memory, and the SDK reports the cause."""
    allocator = new_allocator(name, share)
    backend = SimulatedBackend([allocator])
    with sdk.instrument(backend=backend, run_dir=tmp_path, interval=3600.0):
        play(name, rank, 40, seed=seed, allocator=allocator, on_step=backend.step)
    (file,) = tmp_path.rglob(f"*{SAMPLE_SUFFIX}")
    (device,) = json.loads(file.read_bytes())["devices"]

    assert CAUSES.get((name, rank)) == (device["last_oom"] or {}).get("cause")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    """Seed, rank and length determine a run; only some scenarios depend on the seed."""
    first, again, other = (play(name, FIRST, 20, seed=seed, length=0.5).steps for seed in (1, 1, 2))

    assert first == again
    assert (name in RANDOM) == (first != other)


def test_another_rank_gives_another_run() -> None:
    """Ranks use different random numbers."""
    first, last = (play("fragmentation", rank, 400, length=0.05).steps for rank in (FIRST, LAST))

    assert first != last


FRAGMENTATION_STEPS = 400


@pytest.fixture(scope="module")
def failing() -> Run:
    """The last rank of `fragmentation`."""
    return play("fragmentation", LAST, FRAGMENTATION_STEPS, length=1, measured_every=8)


def test_fragmentation_fails_with_free_memory(failing: Run) -> None:
    """The last rank fails at 60 to 70 % of the run, for a hundredth of its free memory."""
    assert failing.oom is not None
    assert 0.6 <= len(failing.steps) / FRAGMENTATION_STEPS <= 0.7
    assert failing.oom.requested < 200 * MIB
    assert failing.oom.unallocated > 25 * GIB
    assert failing.oom.free < failing.oom.requested


def test_fragmentation_rises_and_stays(failing: Run) -> None:
    """Fragmentation starts low; in the last half of the run it exceeds 0.7, with 25 % stranded."""
    half = len(failing.steps) / 2
    late = [layout for step, layout in failing.layouts if step >= half]
    assert min(layout.fragmentation_ratio or 0 for layout in late) > 0.7
    _, start = failing.layouts[0]
    assert (start.fragmentation_ratio or 0) < 0.1
    assert start.stranded_bytes < 0.05 * GPU_BYTES
    at_step_end = [layout for step, layout in failing.layouts[3::4] if step >= half]
    assert min(layout.stranded_bytes for layout in at_step_end) > 0.25 * GPU_BYTES


def test_fragmentation_retries_until_the_end(failing: Run) -> None:
    """Retries begin in the first third of the run; from then on, every eighth of it has one."""
    retries = [step.retries for step in failing.steps]
    first = next(step for step, count in enumerate(retries) if count)
    assert first < FRAGMENTATION_STEPS / 3
    later, window = retries[first:], FRAGMENTATION_STEPS // 8
    assert all(before < after for before, after in zip(later, later[window:], strict=False))


def test_fragmentation_spares_the_other_ranks() -> None:
    """A rank that is not the last never runs out of memory, and retries now and then."""
    run = play("fragmentation", FIRST, FRAGMENTATION_STEPS, length=1.5)
    retries = [step.retries for step in run.steps]
    assert run.oom is None
    assert retries[FRAGMENTATION_STEPS // 3] < retries[FRAGMENTATION_STEPS] < retries[-1]


@pytest.mark.parametrize("rank", [FIRST, LAST])
def test_healthy_slack(rank: int) -> None:
    """31 to 43 % of the reserved peak is slack, all of it releasable, without a retry."""
    run = play("healthy-slack", rank, 400, length=1, measured_every=20)
    assert run.oom is None
    assert run.steps[-1].retries == 0
    assert 0.31 <= run.slack_at_peak <= 0.43
    at_step_end = [layout for _, layout in run.layouts[1::2]]
    assert {layout.stranded_bytes for layout in at_step_end} == {0}
    assert (at_step_end[-1].fragmentation_ratio or 0) > 0.9


def test_variable_length() -> None:
    """16.39 GiB are reserved at the peak for 10.83 GiB allocated: 34 % slack."""
    run = play("variable-length", FIRST, 60)

    assert pytest.approx(10.83 * GIB, rel=0.01) == max(step.allocated_peak for step in run.steps)
    assert pytest.approx(16.39 * GIB, rel=0.015) == max(step.reserved_peak for step in run.steps)
    assert pytest.approx(0.34, abs=0.01) == run.slack_at_peak


def test_rl_phases() -> None:
    """After training, 60.9 of 127 GB are allocated; with an emptied cache, of 96.6 GB."""
    steps = play("rl-phases", FIRST, 60).steps
    before, after = steps[:30], steps[30:]

    assert {round(step.allocated / GB, 1) * 1000 for step in steps} == {60_900}
    assert pytest.approx([127 * GB] * len(before), rel=0.005) == [step.reserved for step in before]
    assert pytest.approx([96.6 * GB] * len(after), rel=0.005) == [step.reserved for step in after]


def test_retry_storm() -> None:
    """Retries per step rise with the epochs to two at 91 % reserved, and nothing ever fails."""
    run = play("retry-storm", LAST, 90, length=1)
    retries = [step.retries for step in run.steps]
    epochs = [retries[end - 1] - retries[end - 30] for end in (30, 60, 90)]

    assert epochs[0] < 10 < 2 * epochs[0] < epochs[1] < epochs[2]
    assert {after - before for before, after in pairwise(retries[60:])} == {2}
    peak = max(step.reserved_peak for step in run.steps[61:])
    assert pytest.approx(0.91, abs=0.01) == peak / SCENARIOS["retry-storm"].gpu_bytes


@pytest.mark.parametrize("steps", [60, 300])
def test_leak(steps: int) -> None:
    """Each step keeps the same few tensors of 2 MiB; after 90 % of the run, 20 MiB fail."""
    run = play("leak", LAST, steps)
    growth = {after.allocated - before.allocated for before, after in pairwise(run.steps)}
    assert run.oom is not None

    assert len(growth) == 1
    assert growth.pop() % LEAKED_BYTES == 0
    assert run.oom.requested == 20 * MIB
    assert run.oom.free + run.oom.unallocated < 20 * MIB
    assert 0.85 < len(run.steps) / steps < 0.95
    assert len({step.allocated_peak - step.allocated for step in run.steps}) == 1


def test_imbalanced_ranks() -> None:
    """The first rank holds twice as much; when it fails, others have half a GPU left."""
    first, other = play("imbalanced-ranks", FIRST, 60), play("imbalanced-ranks", LAST, 60)
    ratios = [
        a.allocated_peak / b.allocated_peak for a, b in zip(first.steps, other.steps, strict=False)
    ]

    assert pytest.approx([2.0] * len(ratios), rel=0.01) == ratios
    assert first.oom is not None
    assert max(step.reserved_peak for step in other.steps) < 0.55 * first.oom.total


def test_neighbor() -> None:
    """572 MiB fail after three processes of 414 MiB came; this process did not grow."""
    run = play("neighbor", FIRST, 60)
    cells = run.allocator.gpu.use.cells
    assert run.oom is not None

    assert run.oom.requested == 572 * MIB
    assert [cells[slot] for slot in range(1, len(cells))] == [NEIGHBOR_BYTES] * 3
    assert pytest.approx(321 * MIB, abs=100 * MIB) == run.oom.free
    assert {run.steps[0].reserved_peak} == {step.reserved_peak for step in run.steps}


def test_colocated() -> None:
    """The trainer's reserved memory climbs as published; then 970 MiB fail with 758 MiB free."""
    allocator = new_allocator("colocated")
    use = allocator.gpu.use
    trainer: list[int] = []
    run = play(
        "colocated",
        LAST,
        90,
        allocator=allocator,
        on_step=lambda: trainer.append(use.cells[1] - CONTEXT_BYTES),
    )
    climbed = list(dict.fromkeys(trainer))
    assert run.oom is not None

    # The first value is from before the first update, and the ninth update fails.
    assert pytest.approx([30.1, 34.0], abs=0.05) == [climbed[1] / GIB, climbed[5] / GIB]
    assert pytest.approx(38.2, abs=0.05) == (use.cells[1] - CONTEXT_BYTES) / GIB
    assert (run.oom.requested, run.oom.free) == (970 * MIB, 758 * MIB)
    assert {run.steps[0].allocated} == {step.allocated for step in run.steps}


def test_phase_change() -> None:
    """Reserved memory goes from 8 to 15.5 GB and back; the 39th validation fails."""
    run = play("phase-change", LAST, 390)
    start = run.steps[:300]

    assert {round(step.reserved / GB, 1) for step in start} == {8.0}
    assert {round(step.reserved_peak / GB, 1) for step in start} == {8.0, 15.5}
    assert pytest.approx(39) == len(run.steps) / (390 * TRAINED / EPOCHS)
    assert run.oom is not None
    assert run.oom.requested < run.oom.unallocated
