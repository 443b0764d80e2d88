"""A simulated training script, which replaces torchmem.preflight.run.run in tests."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.recordings import RecordedJob, write
from support.reports import CAPACITY

from torchmem.allocator.sizes import MIB
from torchmem.explain.oom_report import encode
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import GpuMemory, RunProgress, RunResult, StepMemory
from torchmem.sample.sample import ByPool
from torchmem.simulator.gpu import CONTEXT_BYTES

ACTIVATIONS = (64 << 10, 48 << 10, 256 << 10, 8 << 10, 100)
"""Bytes per token of a sequence."""


@dataclass(slots=True)
class PlayedScript:
    """Trains with sequences of varying length on the simulated allocator.

    `--batch-size N` multiplies the activations. leak: bytes that each step leaves allocated.
    idle_ranks: ranks that take little more than their weights. odd: the trace has wrong addresses.
    words: output of the script. then: changes each result. plans: all plans that were run.
    """

    leak: int = 0
    idle_ranks: tuple[int, ...] = ()
    odd: bool = False
    words: str = ""
    then: Callable[[RunPlan, RunResult], RunResult] = lambda plan, result: result
    plans: list[RunPlan] = field(default_factory=list)

    def __call__(
        self,
        plan: RunPlan,
        folder: Path,
        progress: Callable[[RunProgress], None],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> RunResult:
        self.plans.append(plan)
        os.write(1 if stdout is None else stdout, self.words.encode())
        job, steps = RecordedJob(plan.gpu.memory_bytes), list[StepMemory]()
        ran_out = not _weights(job) or not self._train(plan, job, steps, progress)
        result = RunResult(
            ended="oom" if ran_out else "steps",
            exit_code=1 if ran_out else 0,
            steps=len(steps),
            seconds=2.5,
            host_bytes=900 * MIB,
            devices=(_device(plan, job, steps),),
            snapshot=self._snapshot(job, folder),
            oom_report=_report(job, plan, folder) if ran_out else None,
        )
        return self.then(plan, result)

    def _train(
        self,
        plan: RunPlan,
        job: RecordedJob,
        steps: list[StepMemory],
        progress: Callable[[RunProgress], None],
    ) -> bool:
        rng, stats = random.Random(1), job.stats
        idle = plan.placement is not None and plan.placement.rank in self.idle_ranks
        for number in range(1, plan.steps + 1):
            stats.reset_peak()
            tokens = rng.randrange(256, 1024) * (0 if idle else _batch(plan))
            blocks = [job.alloc(max(512, tokens * width)) for width in ACTIVATIONS]
            if None in blocks or (self.leak and job.alloc(self.leak) is None):
                return False
            for block in reversed(blocks):
                if block is not None:
                    job.free(block)
            allocated, reserved = stats.allocated_bytes, stats.reserved_bytes
            steps.append(StepMemory(number, allocated.peak, reserved.peak, allocated.current))
            progress(RunProgress(number, plan.steps, allocated.peak, reserved.peak))
        return True

    def _snapshot(self, job: RecordedJob, folder: Path) -> Path:
        snapshot = job.snapshot()
        for entry in snapshot["device_traces"][0] if self.odd else ():
            if entry["action"] in {"alloc", "free_requested", "free_completed"}:
                entry["addr"] ^= 1 << 40
        return write(snapshot, folder / "trace.pickle")


def _batch(plan: RunPlan) -> int:
    words = plan.command
    return int(words[words.index("--batch-size") + 1]) if "--batch-size" in words else 1


def _weights(job: RecordedJob) -> bool:
    return all(job.alloc(size) for size in (96 * MIB, 3 * MIB, 40_000, 300))


def _device(plan: RunPlan, job: RecordedJob, steps: list[StepMemory]) -> GpuMemory:
    stats = job.stats
    fullest = max(steps, key=lambda step: step.peak_allocated, default=None)
    peak = max([stats.allocated_bytes.peak, *(step.peak_allocated for step in steps)])
    return GpuMemory(
        device=0,
        total=plan.gpu.memory_bytes,
        outside=CONTEXT_BYTES,
        peak_allocated=peak,
        peak_reserved=max([stats.reserved_bytes.peak, *(step.peak_reserved for step in steps)]),
        peak_step=fullest.step if fullest else 0,
        peak_phase="backward" if fullest else "setup",
        stranded=7 * MIB,
        retries=stats.num_alloc_retries,
        ooms=stats.num_ooms,
        device_allocs=stats.num_device_alloc,
        phase_peaks=(("setup", 99 * MIB), ("backward", peak)),
        steps=tuple(steps),
    )


def _report(job: RecordedJob, plan: RunPlan, folder: Path) -> Path:
    failed = next(entry for entry in reversed(job.trace) if entry["action"] == "oom")
    held, used = (
        ByPool(0, job.stats.reserved_bytes.current),
        ByPool(0, job.stats.allocated_bytes.current),
    )
    sample = CAPACITY.device
    assert sample.allocator is not None
    allocator = replace(
        sample.allocator,
        allocated_bytes=used,
        active_bytes=used,
        reserved_bytes=held,
        requested_bytes=used,
        inactive_split_bytes=ByPool(0, 0),
    )
    report = replace(
        CAPACITY,
        oom=replace(CAPACITY.oom, requested_bytes=failed["size"]),
        driver_free_bytes=failed["device_free"],
        device=replace(sample, total_bytes=plan.gpu.memory_bytes, allocator=allocator),
        layout=None,
        layout_before=None,
    )
    path = folder / "oom.json"
    path.write_bytes(encode(report))
    return path
