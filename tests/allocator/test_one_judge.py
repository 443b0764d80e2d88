"""Growth is judged in one place: the same series has the same answer wherever it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preflight_figures import gpu_of_steps
from support.recordings import RecordedJob, write

from torchmem.allocator.oom_cause import OomEvidence
from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.growth import live_growth
from torchmem.explain.verdict import Circumstances, judge
from torchmem.preflight.growth import growth
from torchmem.sample.run_history import RunHistory
from torchmem.sdk.capture.pressure import StepPressure
from torchmem.sdk.reading.run_history import RunHistoryRecorder
from torchmem.trace import read_with_stacks
from torchmem.trace.leaks import leaks
from torchmem.trace.lifetimes import Lifetimes

TOTAL = 32 * GIB
BASE = 8 * GIB
STEP = 4 * GIB
"""What each step needs beside what is kept."""
KEEPING_LINE = 3

Kept = list[int]
"""Bytes kept at each step's end, beside BASE."""
SHAPES: Mapping[str, Callable[[int, int], int]] = {
    "leak": lambda step, _: step,
    "flat": lambda _step, _: 0,
    "settled": lambda step, steps: min(step, steps // 3),
    "jump": lambda step, steps: steps // 2 * (step > steps // 2),
    "buffer that was emptied": lambda step, steps: step * (step < steps // 2),
}


def recorded(kept: Kept) -> RunHistory:
    """Return the history that the SDK keeps of a run."""
    recorder = RunHistoryRecorder(clock=lambda: 0.0)
    peak = 0
    for step, size in enumerate(kept, 1):
        peak = max(peak, BASE + size + STEP)
        recorder.add(step, BASE + size, peak)
    history = recorder.published()
    assert history is not None
    return history


def told_of_a_rank_that_runs(kept: Kept) -> float | None:
    """Return the pace in the sample of a rank."""
    history = recorded(kept)
    found = live_growth(history, TOTAL, TOTAL - history.peak_bytes[-1])
    return found.bytes_per_step if found and found.kind == "kept" else None


def told_after_an_oom(kept: Kept) -> float | None:
    """Return the pace in the report of an OOM that follows the last step."""
    history, requested = recorded(kept), 20 * MIB
    held = BASE + kept[-1] + STEP - requested
    evidence = OomEvidence(requested, held, 0, 0, held, held)
    about = Circumstances(len(kept), held, history)
    why = judge(evidence, None, about).why
    return why.bytes_per_step if why and why.onset == "leak" else None


def told_by_a_preflight(kept: Kept) -> float | None:
    """Return the pace in the report of a preflight that was stopped after the last step."""
    gpu = gpu_of_steps([BASE + size for size in kept], [STEP] * len(kept), TOTAL)
    found = growth(gpu, TOTAL, gpu.peak_allocated)
    return found.bytes_per_step if found and found.decides and found.kind == "kept" else None


def starts_a_recording(kept: Kept) -> bool:
    """Return whether the newest reads are a reason to record Python's stacks."""
    pressure, peaks = StepPressure(), accumulate((BASE + size + STEP for size in kept), max)
    found = [
        pressure.update(step, float(step), BASE + size, peak, TOTAL - peak, TOTAL)
        for step, (size, peak) in enumerate(zip(kept, peaks, strict=True), 1)
    ]
    return found[-1]


def told_by_a_recording(kept: Kept, folder: Path) -> float | None:
    """Return the pace of the line that leaks according to a recording of all steps."""
    job = RecordedJob(gpu_bytes=TOTAL)

    def allocate(size: int, line: int) -> Any:
        block = job.alloc(size)
        job.trace[-1]["frames"] = [{"filename": "/job/a.py", "line": line, "name": "train"}]
        return block

    allocate(BASE, 1)
    held: list[Any] = []
    for before, size in pairwise([0, *kept]):
        activations = allocate(STEP, 2)
        if size > before:
            held.append(allocate(size - before, KEEPING_LINE))
        elif size < before:
            for block in held:
                job.free(block)
        job.free(activations)
    [trace] = read_with_stacks(write(job.snapshot(), folder / "job.pickle"))
    found = [leak for leak in leaks(Lifetimes.of(trace)) if leak.line.line == KEEPING_LINE]
    return found[0].size_bytes / len(kept) if found else None


@given(st.sampled_from(list(SHAPES)), st.integers(60, 120), st.integers(40, 150))
@settings(max_examples=40, deadline=None)
def test_every_door_gives_the_same_answer(
    tmp_path_factory: pytest.TempPathFactory, shape: str, steps: int, mib: int
) -> None:
    """A leak has one pace in a sample, an OOM report, a preflight and a recording.

    Nothing else that memory does between steps is called a leak anywhere, or starts a recording.
    """
    rate = mib * MIB
    kept = [rate * SHAPES[shape](step, steps) for step in range(1, steps + 1)]
    told = (
        told_of_a_rank_that_runs(kept),
        told_after_an_oom(kept),
        told_by_a_preflight(kept),
        told_by_a_recording(kept, tmp_path_factory.mktemp("job")),
    )

    assert told == (float(rate) if shape == "leak" else None,) * len(told)
    assert starts_a_recording(kept) == (shape == "leak")
