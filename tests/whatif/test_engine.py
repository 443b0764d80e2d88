"""Replays compared with the truth: the simulator runs the same programs under each setting."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocator_programs import SETTINGS, PlainPools, Simulated
from support.recording_allocator import RecordingAllocator, RecordingGpu
from support.reports import STRANDED
from support.snapshots import REAL_GPUS, of_real_gpu

from torchmem.allocator.settings import LAST_PARSED, AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.explain.remedies import remedies
from torchmem.sample.errors import UsageError
from torchmem.simulator.blocks import BlockOrder
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.trace import read
from torchmem.trace.recording import CaptureFacts, Recording
from torchmem.whatif.engine import SimulatedGpuMemory, line_to_type, on_gpus, what_if
from torchmem.whatif.result import ReplayResult
from torchmem.whatif.settings import torch_versions

CONF = LAST_PARSED.upper()
GPU_BYTES = 100 * MIB
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:30",
)

sizes = st.one_of(
    st.integers(1, 40).map(lambda count: count * MIB),
    st.integers(1, 12 * MIB),
    st.integers(1, 2 * MIB),
)
mallocs = st.tuples(st.just("malloc"), sizes, st.sampled_from([0, 0, 0, 7]))
frees = st.tuples(st.just("free"), st.integers(0, 1000), st.just(0))
flushes = st.tuples(st.just("empty_cache"), st.just(0), st.just(0))
actions = st.sampled_from([mallocs] * 12 + [frees] * 8 + [flushes]).flatmap(lambda action: action)
programs = st.lists(actions, min_size=10, max_size=80)
Program = list[tuple[str, int, int]]


def recording_allocator(
    conf: str, gpu_bytes: int, order: BlockOrder = "segment"
) -> RecordingAllocator:
    """Return an allocator under these settings, with its history on."""
    gpu = RecordingGpu(gpu_bytes)
    return RecordingAllocator(gpu, AllocatorConfig.parse(conf), order=order)


def play(allocator: RecordingAllocator, program: Program) -> Program:
    """Run a program; return the steps that leave a trace.

    An empty_cache that releases nothing leaves none.
    """
    live, seen = [], list[tuple[str, int, int]]()
    for action, number, stream in program:
        if action == "malloc":
            seen.append((action, number, stream))
            live.append(allocator.malloc(number, stream))
        elif action == "free" and live:
            seen.append((action, number, stream))
            allocator.free(live.pop(number % len(live)))
        elif action == "empty_cache" and live:
            freed = allocator.stats.num_device_free
            allocator.empty_cache()
            if allocator.stats.num_device_free > freed:
                seen.append((action, number, stream))
            # Without a free in between, a release before a request would look like a retry.
            seen.append(("free", 0, 0))
            allocator.free(live.pop(0))
    return seen


def play_steps(allocator: RecordingAllocator, steps: Program) -> None:
    """Run exactly these steps, up to an OOM."""
    live = []
    for action, number, stream in steps:
        if action == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
            except OutOfMemoryError:
                return
        elif action == "free":
            allocator.free(live.pop(number % len(live)))
        else:
            allocator.empty_cache()


def counts(replay: ReplayResult) -> tuple[int, ...]:
    """Return what a replay counted."""
    peaks = replay.peak_reserved, replay.peak_allocated
    return (*peaks, replay.retries, replay.ooms, replay.device_allocs, replay.device_frees)


def truth(allocator: RecordingAllocator) -> tuple[int, ...]:
    """Return the same counts of an allocator that ran the program itself."""
    stats = allocator.stats
    peaks = stats.reserved_bytes.peak, stats.allocated_bytes.peak
    driver_calls = stats.num_device_alloc, stats.num_device_free
    return (*peaks, stats.num_alloc_retries, stats.num_ooms, *driver_calls)


@settings(max_examples=20, deadline=None)
@given(programs, st.sampled_from(CONFS), st.sampled_from(["address", "segment", "block"]))
def test_a_complete_recording_predicts_every_setting(
    program: Program, conf: str, order: BlockOrder
) -> None:
    """A trace of the whole program predicts other settings to the byte, on any GPU."""
    recorded = recording_allocator(conf, 100 * GPU_BYTES, order)
    seen = play(recorded, program)
    for gpu in (100 * GPU_BYTES, GPU_BYTES):
        answer = what_if(recorded.recording({CONF: conf}), gpu_bytes=gpu, settings=CONFS)
        if not answer.fidelity.allocations:
            continue
        assert answer.fidelity.share == 1.0
        found = answer.fidelity.block_order
        assert found in (order, None)
        for outcome in answer.outcomes[1:]:
            real = recording_allocator(outcome.conf, gpu, found or "segment")
            play_steps(real, seen)
            assert truth(real) == counts(outcome)


@settings(max_examples=20, deadline=None)
@given(
    programs,
    st.sampled_from(CONFS),
    st.lists(st.integers(1, 100 * GPU_BYTES), min_size=1, max_size=5),
)
def test_a_complete_recording_predicts_every_gpu(
    program: Program, conf: str, sizes: list[int]
) -> None:
    """A trace of the whole program predicts GPUs of any size, in any order, to the byte."""
    recorded = recording_allocator(conf, 100 * GPU_BYTES)
    seen = play(recorded, program)
    recording = recorded.recording({CONF: conf})
    answer = what_if(recording, gpu_bytes=100 * GPU_BYTES, settings=())
    gpus = [
        SimulatedGpuMemory(str(size), size, size)
        for size in (*sizes, recorded.stats.reserved_bytes.peak or 1)
    ]
    own = SimulatedGpuMemory("own", 100 * GPU_BYTES, 100 * GPU_BYTES)
    for gpu, outcome in zip(gpus, on_gpus(recording, own, gpus, answer), strict=True):
        real = recording_allocator(conf, gpu.total)
        play_steps(real, seen)
        assert (gpu.name, truth(real)) == (outcome.name, counts(outcome))


def random_recording(name: str, operations: int, part: float = 1) -> Recording:
    """Return the last part of the history of a random program under one of the settings."""
    setting = SETTINGS[name]
    simulated = Simulated(setting)
    allocator = recording_allocator(setting.conf, setting.gpu)
    allocator.set_memory_fraction(
        min(setting.fraction, allocator.config.per_process_memory_fraction)
    )
    simulated.allocator = allocator
    simulated.gpu = allocator.gpu  # type: ignore[assignment]
    programmer = PlainPools(setting, random.Random(name))
    for _ in range(operations):
        operation = programmer.next()
        programmer.learn(operation, simulated.run(operation))
    events = allocator.events[round(len(allocator.events) * (1 - part)) :]
    return allocator.recording({CONF: setting.conf}, events)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_reproduced(name: str) -> None:
    """With streams, events, pools, retries and OOMs, every allocation gets its address."""
    setting = SETTINGS[name]
    # The garbage collection depends on the exact limit, which an OOM reveals only roughly.
    limit = int(setting.fraction * setting.gpu) if setting.fraction < 1 else None
    fidelity = what_if(random_recording(name, 1200), gpu_bytes=limit, settings=()).fidelity
    # A trace has too little information on the garbage collection of private pools.
    missed = 0.01 * fidelity.allocations if name == "pools_roundup" else 0
    assert fidelity.allocations - fidelity.landed <= missed
    assert fidelity.recorded_peak_reserved == fidelity.replayed_peak_reserved
    assert fidelity.allocations > 250


FRAGMENTING_GPU = 1200 * MIB


def fragmenting(allocator: RecordingAllocator) -> None:
    """Fragment the memory: long-lived tensors take half of each segment that larger ones left."""
    for block in [allocator.malloc(40 * MIB) for _ in range(24)]:
        allocator.free(block)
    for _ in range(24):
        allocator.malloc(21 * MIB)
    allocator.malloc(300 * MIB)


def fragmented() -> Recording:
    """Return the trace of a program that fails although much of the GPU is free."""
    allocator = recording_allocator("", FRAGMENTING_GPU)
    with pytest.raises(OutOfMemoryError):
        fragmenting(allocator)
    return allocator.recording({CONF: ""})


def test_expandable_segments_are_recommended_if_they_prevent_the_oom() -> None:
    """For a run that fails of fragmentation, the answer has the command that prevents it."""
    answer = what_if(fragmented())
    by_name = {replay.name: replay for replay in answer.outcomes}
    recorded = by_name["recorded"]

    assert (answer.gpu_bytes, answer.gpu_source) == (FRAGMENTING_GPU, "oom")
    assert recorded.oom is not None
    assert (recorded.oom.cause, recorded.oom.detail) == ("fragmentation", "stranded")
    assert recorded.oom.requested == 300 * MIB
    assert recorded.oom.event == answer.events - 1
    assert by_name["expandable segments"].oom is None
    assert (
        answer.verdict.decision,
        answer.verdict.recommended,
    ) == ("change", "expandable segments")
    assert answer.verdict.line == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    allocator = recording_allocator("expandable_segments:True", FRAGMENTING_GPU)
    fragmenting(allocator)
    assert allocator.stats.num_ooms == 0


RECORDED = fragmented()
PINNED, EXPANDABLE = "pinned_use_cuda_host_register:True", "expandable_segments:True"


@pytest.mark.parametrize(
    ("settings_in_effect", "versions", "line"),
    [
        ({}, {}, "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({}, {"torch": "2.9.1"}, "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({}, {"torch": "2.10.0"}, "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (
            {CONF: PINNED},
            {"torch": "2.13.0"},
            f"unset PYTORCH_CUDA_ALLOC_CONF; export PYTORCH_ALLOC_CONF={PINNED},{EXPANDABLE}",
        ),
    ],
)
def test_the_command_names_the_variable_of_the_version(
    settings_in_effect: dict[str, str], versions: dict[str, str], line: str
) -> None:
    """It is that of `torchmem why`, and the old name where the version is unknown."""
    recording = replace(fragmented(), settings=settings_in_effect)
    answer = what_if(recording, settings=["expandable_segments:True"], versions=versions)

    assert line == answer.verdict.line


@given(st.integers(1, 20), st.sampled_from(["+cu130", "+rocm6.4", ""]))
def test_the_variable_is_that_of_the_oom_report(minor: int, build: str) -> None:
    """For one PyTorch, a recording that tells its version gets the variable of `torchmem why`."""
    version = f"2.{minor}.0{build}"
    process = replace(STRANDED.process, versions={"torch": version})
    report = replace(STRANDED, process=process, allocator_settings={})
    (said,) = remedies(report)[0].lines
    recording = replace(RECORDED, facts=CaptureFacts(version))

    assert said == line_to_type(recording, EXPANDABLE, torch_versions(recording))


def test_settings_tell_a_version() -> None:
    """A plain snapshot does not name its version, but some settings exist only since 2.13."""
    recording = replace(fragmented(), settings={"max_cached_size": -1})
    answer = what_if(recording, settings=[EXPANDABLE])

    assert answer.verdict.line == f"export PYTORCH_ALLOC_CONF={EXPANDABLE}"


def test_several_roundings_are_tried() -> None:
    """Sizes are rounded to 2, 4, 8 and 16 divisions of a power of 2."""
    allocator = recording_allocator("", 100 * GPU_BYTES)
    for count in range(160, 255, 3):
        allocator.free(allocator.malloc(count * MIB // 4))
        allocator.malloc(2 * MIB)
    answer = what_if(allocator.recording({}))
    peaks = {
        replay.conf: replay.peak_reserved
        for replay in answer.outcomes
        if replay.conf.startswith("roundup")
    }

    assert [f"roundup_power2_divisions:{count}" for count in (2, 4, 8, 16)] == list(peaks)


def test_the_settings_stay_if_none_helps() -> None:
    """For a run that needs more than the GPU has, the answer is to request less."""
    allocator = recording_allocator("", GPU_BYTES)
    for _ in range(3):
        allocator.malloc(30 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB)
    answer = what_if(allocator.recording({CONF: ""}))
    assert (
        answer.verdict.decision,
        answer.verdict.recommended,
        answer.verdict.line,
    ) == ("keep", None, None)
    assert "smaller batch" in answer.verdict.sentence


def test_a_trace_that_is_not_reproduced_gets_no_recommendation() -> None:
    """If the replay results in other addresses, the answer is the reason alone."""
    recording = fragmented()
    moved = tuple(
        replace(event, address=event.address + MIB) if event.action == "alloc" else event
        for event in recording.events
    )
    answer = what_if(replace(recording, events=moved))
    assert not answer.fidelity.trusted
    assert answer.verdict.decision == "none"
    assert [outcome.name for outcome in answer.outcomes] == ["recorded"]
    assert "No recommendation" in answer.verdict.sentence


def test_without_a_gpu_no_setting_runs_out_of_memory() -> None:
    """On a GPU of unknown size, the answer is what each setting needs."""
    allocator = recording_allocator("", 100 * FRAGMENTING_GPU)
    fragmenting(allocator)
    answer = what_if(allocator.recording({CONF: ""}))
    assert answer.gpu_bytes is None
    assert answer.outcomes[0].sufficient == allocator.stats.reserved_bytes.peak
    assert {outcome.name for outcome in answer.outcomes if outcome.refused} == {
        "garbage collection"
    }
    assert "not known" in answer.caveats[0]


def test_settings_that_pytorch_rejects_are_not_replayed() -> None:
    """A setting that would stop the program at its start has PyTorch's reason."""
    answer = what_if(fragmented(), settings=("max_split_size_mb:16", "max_split_size_mb:64"))
    _, refused, tried = answer.outcomes
    assert refused.refused == "max_split_size_mb must be a whole number, 20 or more."
    assert tried.refused is None


def test_progress_never_falls() -> None:
    """Progress rises up to the number of events of all replays, which is constant."""
    seen: list[tuple[int, int]] = []
    what_if(fragmented(), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert 0 < seen[-1][0] <= seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_a_gpu_without_memory_is_rejected() -> None:
    """A GPU of 0 bytes is a usage error."""
    with pytest.raises(UsageError):
        what_if(fragmented(), gpu_bytes=0)


@pytest.mark.parametrize("name", REAL_GPUS)
def test_recordings_of_real_gpus_are_reproduced(name: str, tmp_path: Path) -> None:
    """Every allocation of public traces from real GPUs gets its recorded address."""
    for recording in read(of_real_gpu(name, tmp_path)):
        answer = what_if(recording, settings=())
        assert answer.fidelity.allocations
        assert answer.fidelity.share == 1.0
        assert answer.fidelity.block_order in {"address", None}


def test_a_smaller_gpu_is_compared_with_the_recorded_settings_on_it() -> None:
    """The recorded settings are replayed on a smaller GPU, and fail there as they would."""
    allocator = recording_allocator("", 100 * FRAGMENTING_GPU)
    fragmenting(allocator)
    answer = what_if(
        allocator.recording({CONF: ""}),
        gpu_bytes=FRAGMENTING_GPU,
        settings=["expandable_segments:True"],
    )
    recorded, here, expandable = answer.outcomes
    assert (recorded.name, recorded.oom) == ("recorded", None)
    assert here.oom is not None
    assert (here.name, here.oom.requested) == ("recorded, this GPU", 300 * MIB)
    assert expandable.name == answer.verdict.recommended


@pytest.mark.parametrize("size", [1, MIB // 2, 1 << 62, 1 << 44])
def test_mappings_that_pytorch_never_makes_are_rejected(size: int) -> None:
    """A malicious trace with any mapping is one sentence, and uses no memory or time."""
    recording = fragmented()
    wild = [
        replace(recording.events[0], action=action, size=size)
        for action in ("segment_map", "segment_unmap")
    ]
    with pytest.raises(UsageError, match="damaged"):
        what_if(replace(recording, events=(*recording.events, *(wild * 20))))
