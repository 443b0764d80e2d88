"""The verdict on an OutOfMemoryError: the cause, the onset, and what each change would give."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.oom_cause import LargestFreeBlocks, OomEvidence
from torchmem.explain.verdict import Circumstances, OnsetEvidence, Verdict, judge, judge_library
from torchmem.sample.run_history import RunHistory
from torchmem.sample.sample import ONSETS, OOM_CAUSES
from torchmem.sdk.reading.run_history import EARLY_STEPS, RunHistoryRecorder

GIB = 1 << 30
MIB = 1 << 20
FULL = OomEvidence(
    requested=2 * GIB,
    limit=80 * GIB,
    driver_free=GIB,
    cached_free=0,
    reserved=78 * GIB,
    total=80 * GIB,
)
FIRST = Circumstances(active=78 * GIB)
sizes = st.integers(0, 80 * GIB)
evidence_of_any_gpu = st.builds(OomEvidence, sizes, sizes, sizes, sizes, sizes, st.none() | sizes)


def _history(allocated: list[int], peaks: list[int], outside: int = GIB) -> RunHistory:
    """Return a history with one point for each step."""
    number = len(allocated)
    return RunHistory(
        steps=tuple(range(1, number + 1)),
        seconds=tuple(float(index) for index in range(number)),
        allocated_bytes=tuple(allocated),
        peak_bytes=tuple(max(peaks[: index + 1]) for index in range(number)),
        stranded_bytes=(None,) * number,
        outside_bytes=(outside,) * number,
        kept_bytes=(None,) * number,
    )


def _run(history: RunHistory, active: int = 78 * GIB) -> Circumstances:
    return Circumstances(history.steps[-1], active, history)


FLAT = _history([20 * GIB] * 50, [60 * GIB + index % 7 * 128 * MIB for index in range(50)])
LEAK = _history(
    [20 * GIB + index * GIB for index in range(50)], [26 * GIB + index * GIB for index in range(50)]
)


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (FULL, "capacity"),
        (replace(FULL, cached_free=30 * GIB), "fragmentation"),
        (replace(FULL, cached_free=5 * GIB), "capacity"),
        (replace(FULL, private_free=30 * GIB), "fragmentation"),
        (replace(FULL, limit=40 * GIB, reserved=39 * GIB, driver_free=40 * GIB), "limit"),
        (replace(FULL, reserved=10 * GIB), "external"),
        (replace(FULL, reserved=10 * GIB, total=None), "capacity"),
        (replace(FULL, reserved=10 * GIB, shares_host_memory=True), "capacity"),
        (replace(FULL, reserved=20 * GIB, driver_free=58 * GIB), "limit"),
    ],
)
def test_the_cause_is_the_change_that_gives_most_room(evidence: OomEvidence, cause: str) -> None:
    """In a first step, the cause is the change with a tenth of the GPU to spare, else capacity."""
    assert cause == judge(evidence, None, FIRST).cause


def test_a_driver_that_refuses_what_it_has_free_is_named() -> None:
    """As under WSL: 2 GiB fail with 58 GiB free, and no change of the program would help."""
    evidence = replace(FULL, reserved=20 * GIB, driver_free=58 * GIB, cached_free=GIB)
    assert judge(evidence, None, _run(FLAT)) == Verdict("limit", "driver", None)
    forbidden = replace(evidence, limit=21 * GIB)
    assert judge(forbidden, None, FIRST).detail != "driver"


def test_a_leak_is_a_leak_though_the_rests_add_up_to_one_request() -> None:
    """On a GPU that a leak has filled, free rests for a few more steps are not fragmentation."""
    evidence = replace(FULL, requested=256 * MIB, cached_free=2 * GIB, driver_free=0)
    verdict = judge(evidence, LargestFreeBlocks(own=128 * MIB), _run(LEAK))
    assert (verdict.cause, verdict.why and verdict.why.onset) == ("capacity", "leak")
    assert verdict.why is not None
    assert verdict.why.bytes_per_step == GIB
    gain = next(gain for gain in verdict.gains if gain.change == "compaction")
    assert not gain.matters
    assert gain.steps == pytest.approx(1.75)


def test_a_leak_with_much_stranded_memory_is_both() -> None:
    """Where compaction gives a tenth of the steps, the cause is fragmentation, the onset a leak."""
    evidence = replace(FULL, requested=256 * MIB, cached_free=18 * GIB, driver_free=0)
    verdict = judge(evidence, LargestFreeBlocks(own=128 * MIB), _run(LEAK, 60 * GIB))
    assert (verdict.cause, verdict.detail) == ("fragmentation", "stranded")
    assert verdict.why is not None
    assert verdict.why.onset == "leak"


def test_steps_that_need_more_and_more() -> None:
    """Where only the peaks grow, steadily, the onset is a larger step with its bytes a step."""
    history = _history([20 * GIB] * 50, [30 * GIB + index * GIB for index in range(50)])
    verdict = judge(FULL, None, _run(history, 79 * GIB))
    assert verdict.why is not None
    assert (verdict.why.onset, verdict.why.bytes_per_step) == ("larger_step", GIB)


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
def test_batches_of_random_lengths_do_not_grow(kind: str) -> None:
    """A job whose steps only differ in size gets a verdict of growth at most once in 60 jobs."""
    whys = [_ordinary_end(seed, kind) for seed in range(60)]
    growing = [why for why in whys if why is not None and why.bytes_per_step is not None]
    assert len(growing) <= 1


def _ordinary_end(seed: int, kind: str) -> OnsetEvidence | None:
    """Return why a job ran out whose steps need a random number of bytes each."""
    generator, recorder = random.Random(seed), RunHistoryRecorder()
    peak = 0
    for step in range(1, 4000):
        uniform, lognormal = generator.uniform(10, 59.5), generator.lognormvariate(3, 0.45)
        own = uniform if kind == "uniform" else lognormal
        needed = int((20 + own) * GIB)
        if needed > 78 * GIB:
            evidence = replace(FULL, requested=GIB // 2, driver_free=GIB // 4, cached_free=GIB // 2)
            history = recorder.published()
            return judge(evidence, None, Circumstances(step - 1, 77 * GIB, history)).why
        peak = max(peak, needed)
        if step <= EARLY_STEPS or step % 20 == 0:
            recorder.add(step, 20 * GIB, peak, outside=GIB)
    return None


def test_one_step_that_needs_more() -> None:
    """One step that needs much more than all before is told apart, with how much more."""
    verdict = judge(FULL, None, _run(FLAT, 78 * GIB))
    assert verdict.why is not None
    assert (verdict.why.onset, verdict.why.bytes_per_step) == ("larger_step", None)
    assert verdict.why.bytes == 80 * GIB - max(FLAT.peak_bytes)


def test_a_tensor_that_appeared_once() -> None:
    """A single jump in what is kept between steps is a new phase, no leak."""
    history = _history([20 * GIB] * 25 + [30 * GIB] * 25, [60 * GIB] * 25 + [70 * GIB] * 25)
    verdict = judge(FULL, None, _run(history, 70 * GIB))
    assert verdict.why is not None
    assert (verdict.why.onset, verdict.why.bytes, verdict.why.since_step) == (
        "new_phase",
        10 * GIB,
        26,
    )


def test_an_evaluation_that_needs_more_than_training() -> None:
    """A request that fails in an evaluation is a new phase, and its name is said."""
    about = replace(_run(FLAT), phase="evaluate()")
    why = judge(FULL, None, about).why
    assert why is not None
    assert (why.onset, why.phase) == ("new_phase", "evaluate()")


def test_memory_that_was_enough_before_is_stranded() -> None:
    """A step that needs no more than earlier ones failed because free memory is stranded."""
    evidence = replace(FULL, requested=512 * MIB, cached_free=18 * GIB, driver_free=0)
    verdict = judge(evidence, LargestFreeBlocks(own=256 * MIB), _run(FLAT, 58 * GIB))
    assert verdict.why is not None
    assert (verdict.cause, verdict.why.onset) == ("fragmentation", "stranded")


def test_ordinary_variation_that_reaches_the_limit() -> None:
    """A step that needs hardly more than the others is tight, and capacity."""
    evidence = replace(
        FULL, requested=256 * MIB, driver_free=0, cached_free=512 * MIB, reserved=79 * GIB
    )
    full = _history([20 * GIB] * 50, [77 * GIB + index % 7 * 256 * MIB for index in range(50)])
    verdict = judge(evidence, LargestFreeBlocks(own=MIB), _run(full, 79 * GIB - 512 * MIB))
    assert verdict.why is not None
    assert (verdict.cause, verdict.why.onset) == ("capacity", "tight")


def test_others_that_took_memory_during_the_run() -> None:
    """Memory that others took since the run began is the onset, and gives the cause."""
    history = replace(FLAT, outside_bytes=(GIB,) * 45 + (30 * GIB,) * 5)
    evidence = replace(FULL, reserved=49 * GIB, driver_free=GIB)
    verdict = judge(evidence, None, replace(_run(history, 48 * GIB), is_alone=True))
    assert verdict.why is not None
    assert (verdict.cause, verdict.why.onset) == ("external", "outside")


@pytest.mark.parametrize(
    ("about", "garbage", "onset"),
    [
        (FIRST, 10 * GIB, "garbage"),
        (FIRST, 512 * MIB, "first_step"),
        (_run(LEAK), 48 * GIB, "garbage"),
        (_run(LEAK), 10 * GIB, "leak"),
        (_run(FLAT, 58 * GIB), 30 * GIB, "garbage"),
        (_run(FLAT, 58 * GIB), None, "tight"),
        (replace(FIRST, is_training=False), 10 * GIB, "garbage"),
    ],
)
def test_garbage_is_the_onset_if_the_request_fits_without_it(
    about: Circumstances, garbage: int | None, onset: str
) -> None:
    """Garbage explains an OOM like any change; what was kept is compared without the garbage."""
    why = judge(FULL, None, replace(about, garbage=garbage)).why
    assert why is not None
    assert why.onset == onset
    assert why.onset != "garbage" or why.bytes == garbage


def test_what_was_freed_before_is_no_leak() -> None:
    """Memory that grew from step to step but was freed before the OOM is not why it ran out."""
    why = judge(FULL, None, _run(LEAK, 10 * GIB)).why
    assert why is not None
    assert why.onset != "leak"


def test_stranded_memory_of_a_run_that_has_filled_a_buffer() -> None:
    """A buffer that filled in the first steps does not make stranded memory worth less."""
    kept = [min(50, 10 + 5 * index) * GIB for index in range(50)]
    evidence = replace(FULL, requested=512 * MIB, cached_free=18 * GIB, driver_free=0)
    about = _run(_history(kept, [size + 2 * GIB for size in kept]), 51 * GIB)
    verdict = judge(evidence, LargestFreeBlocks(own=256 * MIB), about)
    assert verdict.why is not None
    assert (verdict.cause, verdict.why.onset) == ("fragmentation", "stranded")


def test_stranded_memory_that_does_not_matter_is_not_the_onset() -> None:
    """The onset is stranded memory only where the cause is fragmentation."""
    evidence = replace(FULL, cached_free=5 * GIB, driver_free=0, reserved=79 * GIB)
    verdict = judge(evidence, LargestFreeBlocks(own=GIB), _run(FLAT, 58 * GIB))
    assert verdict.why is not None
    assert (verdict.cause, verdict.why.onset) == ("capacity", "tight")


def test_communicators_of_a_distributed_job_are_not_other_processes() -> None:
    """Beside other ranks, memory outside the allocator that came later may be this process's."""
    history = replace(FLAT, outside_bytes=(GIB // 2,) * 50)
    evidence = replace(FULL, reserved=76 * GIB, requested=GIB, driver_free=0)
    beside = judge(evidence, None, _run(history))
    alone = judge(evidence, None, replace(_run(history), is_alone=True))
    assert {gain.change for gain in alone.gains} == {"neighbors"}
    assert beside.gains == ()


def test_a_little_that_others_took_from_a_step_that_fitted_before() -> None:
    """If a step needs no more than before, the little that others took since is why it fails."""
    evidence = replace(FULL, reserved=76 * GIB, requested=GIB, driver_free=0)
    about = replace(_run(FLAT, max(FLAT.peak_bytes) - 2 * GIB), is_alone=True)
    verdict = judge(evidence, None, about)
    assert verdict.why is not None
    assert (verdict.cause, verdict.why.onset) == ("external", "outside")


def test_inference_without_steps_is_unknown() -> None:
    """Without steps and without gradients, the onset is unknown."""
    assert judge(FULL, None, replace(FIRST, is_training=False)).why is None


def test_a_limit_that_a_neighbor_does_not_lift() -> None:
    """Below a memory fraction, the memory of others gives no room."""
    evidence = replace(FULL, limit=20 * GIB, reserved=19 * GIB, driver_free=5 * GIB)
    gains = {gain.change: gain.bytes for gain in judge(evidence, None, FIRST).gains}
    assert "neighbors" not in gains
    assert gains["limit"] == 3 * GIB


def test_a_block_that_fits_was_pending() -> None:
    """If a block of the request's stream and pool fits, it became free after the search."""
    evidence = replace(FULL, cached_free=30 * GIB)
    assert judge(evidence, LargestFreeBlocks(own=2 * GIB), FIRST).cause == "pending"
    other = LargestFreeBlocks(own=GIB, other_stream=9 * GIB)
    assert judge(evidence, other, FIRST).cause != "pending"


def test_memory_that_waits_for_a_stream_is_not_stranded() -> None:
    """Free memory that had only to be waited for is not told as what had changed."""
    evidence = replace(FULL, requested=GIB, cached_free=30 * GIB, driver_free=0, reserved=79 * GIB)
    run = _run(FLAT, 49 * GIB)
    waits = judge(evidence, LargestFreeBlocks(own=2 * GIB), run).why
    stranded = judge(evidence, LargestFreeBlocks(own=GIB // 2), run).why

    assert (waits and waits.onset, stranded and stranded.onset) == ("tight", "stranded")


def test_a_library_with_a_full_cache_beside_it() -> None:
    """Where PyTorch caches a tenth of the GPU, its release matters to a library's request."""
    evidence = replace(FULL, requested=MIB, driver_free=0)
    assert judge_library(evidence, 12 * GIB, FIRST).material
    assert not judge_library(evidence, 64 * MIB, FIRST).material
    assert not judge_library(evidence, None, FIRST).gains


@given(evidence_of_any_gpu, st.sampled_from([FIRST, _run(FLAT), _run(LEAK), Circumstances()]))
def test_any_oom_has_a_consistent_verdict(evidence: OomEvidence, about: Circumstances) -> None:
    """For any numbers, the cause is exported, gains are not negative, and a cause has its gain."""
    verdict = judge(evidence, None, about)
    assert verdict.cause in OOM_CAUSES
    assert verdict.why is None or verdict.why.onset in ONSETS
    assert all(gain.bytes >= 0 for gain in verdict.gains)
    assert bool(verdict.material) == (verdict.cause != "capacity" and verdict.detail != "driver")


@given(evidence_of_any_gpu, st.integers(0, 80 * GIB))
def test_more_room_never_takes_a_gain_away(evidence: OomEvidence, more: int) -> None:
    """A change that matters still matters if more of the cache is free."""
    before = judge(evidence, None, FIRST)
    after = judge(replace(evidence, cached_free=evidence.cached_free + more), None, FIRST)
    assert _compaction(before) <= _compaction(after)


def _compaction(verdict: Verdict) -> bool:
    return any(gain.matters for gain in verdict.gains if gain.change == "compaction")
