"""Samples for tests: hypothesis strategies, and one sample with all fields set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from torchmem.sample.engine import MAX_RESIDUALS, Engine
from torchmem.sample.libraries import Communicator, RmmMemory
from torchmem.sample.release_tiers import TIERS
from torchmem.sample.run_history import MAX_POINTS, Growth, GrowthKind, RunHistory
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    HOOK_FAULTS,
    ONSETS,
    OOM_CAUSES,
    STEP_DURATION_BOUNDS,
    Allocator,
    BlockCounts,
    ByPool,
    Counters,
    DeviceSample,
    FirstRead,
    HostMemory,
    Layout,
    OomDetail,
    OomRecord,
    PinnedMemory,
    Process,
    Releases,
    Sample,
    SelfCost,
    Steps,
)

UUID = "GPU-4d2f1c7a-0000-4000-8000-00000000000a"
size = st.integers(0, 1 << 40)
count = st.integers(0, 1 << 30)
pools = st.builds(ByPool, size, size)
undivided = st.builds(ByPool, st.none(), st.none(), size)
seconds = st.floats(0, 1e9)
text = st.text(max_size=20)


def _optional(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


def _possible(device: DeviceSample) -> DeviceSample:
    """Leave out free memory that the device does not have."""
    total, first = device.total_bytes, device.first_read
    if total is None:
        return device
    if first is not None and first.driver_free_bytes > total:
        device = replace(device, first_read=None)
    is_more = (device.driver_free_bytes or 0) > total
    return replace(device, driver_free_bytes=None) if is_more else device


layouts = st.builds(
    Layout,
    timestamp=seconds,
    segments=_optional(pools),
    blocks=_optional(st.builds(BlockCounts, pools, pools, pools)),
    releasable_bytes=size,
    stranded_bytes=size,
    largest_free_block_bytes=_optional(st.just(0)),
    free_block_counts=_optional(st.tuples(*[count] * (len(FREE_BLOCK_BOUNDS) + 1))),
    private_used_bytes=size,
    private_free_bytes=size,
    headroom_bytes=_optional(size),
    headroom_flush_bytes=_optional(size),
    pending_free_bytes=_optional(size),
    largest_allocated_block_bytes=_optional(size),
    in_use_bytes=_optional(size),
)
ooms = st.builds(
    OomRecord,
    seconds,
    _optional(size),
    st.sampled_from(OOM_CAUSES),
    _optional(st.sampled_from(get_args(OomDetail))),
    _optional(st.just("train.py:7")),
    _optional(st.just("step")),
    _optional(st.sampled_from(ONSETS)),
)


@st.composite
def _run_histories(draw: st.DrawFn) -> RunHistory:
    """Draw a history of any length, whose columns have one length and whose time goes on."""
    number = draw(st.integers(0, MAX_POINTS))

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=number, max_size=number)))

    return RunHistory(
        steps=tuple(sorted(column(count))),
        seconds=tuple(sorted(column(seconds))),
        allocated_bytes=column(size),
        peak_bytes=column(size),
        stranded_bytes=column(_optional(size)),
        outside_bytes=column(_optional(size)),
        kept_bytes=column(_optional(size)),
        first_components=draw(st.dictionaries(text, size, max_size=3)),
        last_components=draw(st.dictionaries(text, size, max_size=3)),
    )


run_histories = _run_histories()
growths = st.builds(
    Growth,
    st.sampled_from(get_args(GrowthKind)),
    st.floats(1, 1e12),
    count,
    size,
    _optional(st.sampled_from(["held", "kv_cache"])),
)
engine_parts = st.dictionaries(st.sampled_from(["weights", "kv_cache", "lora"]), size)
engines = st.builds(
    Engine,
    st.just("vllm"),
    *[engine_parts] * 4,
    _optional(size),
    count,
    st.lists(size, max_size=MAX_RESIDUALS).map(tuple),
)
in_use = pools | undivided
allocators = st.builds(
    Allocator, in_use, in_use, in_use, _optional(pools), _optional(pools), size, size, size
)
counters = st.builds(
    Counters,
    *[_optional(count)] * 5,
    ooms=_optional(st.dictionaries(st.sampled_from(OOM_CAUSES), count, max_size=4)),
)
releases = st.builds(Releases, count, size, seconds, st.booleans())
communicators = st.builds(Communicator, size, size, size, st.booleans(), _optional(seconds))
devices = st.builds(
    DeviceSample,
    index=st.integers(0, 15),
    uuid=_optional(st.just(UUID)),
    name=_optional(text),
    total_bytes=_optional(size),
    allocator=_optional(allocators),
    counters=counters,
    layout=_optional(layouts),
    last_oom=_optional(ooms),
    phase_peaks=st.dictionaries(text, size, max_size=3),
    stats_timestamp=_optional(seconds),
    driver_free_bytes=_optional(size),
    components=st.dictionaries(text, size, max_size=8),
    component_peaks=st.dictionaries(text, size, max_size=8),
    component_peak_timestamp=_optional(seconds),
    first_read=_optional(st.builds(FirstRead, seconds, size, size)),
    releases=st.dictionaries(st.sampled_from(list(TIERS)), releases, max_size=4),
    run_history=_optional(run_histories),
    growth=_optional(growths),
    engine=_optional(engines),
    shares_host_memory=st.booleans(),
    managed_bytes=_optional(size),
    visible_devices=_optional(count),
    communicators=st.dictionaries(text, communicators, max_size=3),
    rmm=_optional(st.builds(RmmMemory, *[_optional(size)] * 3, st.booleans())),
).map(_possible)
processes = st.builds(
    Process,
    pid=st.integers(1, 1 << 22),
    pid_namespace=_optional(st.integers(1, 1 << 32)),
    start_ticks=_optional(st.integers(0, 1 << 40)),
    hostname=text,
    run=text,
    rank=st.integers(0, 4096),
    local_rank=_optional(st.integers(0, 15)),
    world_size=_optional(st.integers(1, 4096)),
    script=_optional(text),
    labels=st.dictionaries(text, text, max_size=3),
    versions=st.dictionaries(text, text, max_size=3),
    start_timestamp=_optional(seconds),
)
steps = st.builds(
    Steps, count, st.tuples(*[count] * (len(STEP_DURATION_BOUNDS) + 1)), seconds, _optional(count)
)
costs = st.builds(
    SelfCost,
    *[_optional(seconds)] * 2,
    seconds,
    st.dictionaries(text, count, max_size=2),
    oom_duration_seconds=_optional(seconds),
)
samples = st.builds(
    Sample,
    timestamp=seconds,
    process=processes,
    devices=st.lists(devices, max_size=2, unique_by=lambda device: device.uuid).map(tuple),
    steps=steps,
    cost=costs,
    allocator_settings=st.dictionaries(text, text, max_size=3),
    settings_ignored=st.dictionaries(text, st.booleans(), max_size=3),
    oom_pending=st.booleans(),
    ended=_optional(st.sampled_from(["exited", "failed", "oom"])),
    metrics_url=_optional(text),
    stall_after_seconds=_optional(seconds),
    host=_optional(st.builds(HostMemory, size, _optional(size), _optional(size))),
    pinned=_optional(st.builds(PinnedMemory, size, size, _optional(seconds))),
    hooks_dropped=st.dictionaries(st.sampled_from(HOOK_FAULTS), count, max_size=3),
)


def full_sample(rank: int = 0, pid: int = 4242, uuid: str = UUID, run: str = "night") -> Sample:
    """Return a sample of one rank on an 80 GB GPU in which all fields are known."""
    gib = 1 << 30
    free_blocks = [0] * (len(FREE_BLOCK_BOUNDS) + 1)
    free_blocks[3], free_blocks[12] = 7, 2
    device = DeviceSample(
        index=0,
        uuid=uuid,
        name="H100",
        total_bytes=80 * gib,
        allocator=Allocator(
            allocated_bytes=ByPool(1 << 20, 40 * gib),
            active_bytes=ByPool(1 << 20, 41 * gib),
            reserved_bytes=ByPool(2 << 20, 60 * gib),
            requested_bytes=ByPool(1 << 20, 39 * gib),
            inactive_split_bytes=ByPool(1 << 20, 12 * gib),
            allocated_peak_bytes=50 * gib,
            active_peak_bytes=51 * gib,
            reserved_peak_bytes=62 * gib,
        ),
        counters=Counters(3, 0, 120, 40, 3, {"fragmentation": 1}, 4, 2.5),
        layout=Layout(
            timestamp=1_700_000_000.0,
            segments=ByPool(1, 30),
            blocks=BlockCounts(ByPool(5, 60), ByPool(0, 1), ByPool(2, 7)),
            releasable_bytes=7 * gib,
            stranded_bytes=12 * gib,
            largest_free_block_bytes=2 * gib,
            free_block_counts=tuple(free_blocks),
            private_used_bytes=gib,
            private_free_bytes=gib // 2,
            headroom_bytes=2 * gib,
            headroom_flush_bytes=9 * gib,
            pending_free_bytes=gib,
            largest_allocated_block_bytes=3 * gib,
            in_use_bytes=81 * gib // 2,
        ),
        last_oom=OomRecord(
            1_700_000_100.0,
            3 * gib,
            "fragmentation",
            "stranded",
            "model.py:88",
            "GPT.forward",
            "stranded",
        ),
        phase_peaks={"forward": 48 * gib},
        stats_timestamp=1_700_000_002.0,
        driver_free_bytes=5 * gib,
        limit_bytes=72 * gib,
        planned_peak_bytes=66 * gib,
        components={
            "parameters": 8 * gib,
            "gradients": 8 * gib,
            "optimizer_state": 16 * gib,
            "kv_cache": 2 * gib,
            "held": 5 * gib + (1 << 20),
            "pending": gib,
            "rounding": gib,
        },
        component_peaks={
            "parameters": 8 * gib,
            "gradients": gib,
            "optimizer_state": 16 * gib,
            "kv_cache": 2 * gib,
            "held": 5 * gib,
            "step": 18 * gib,
            "rounding": gib,
        },
        component_peak_timestamp=1_700_000_001.0,
        first_read=FirstRead(1_699_996_400.0, 2 << 20, 79 * gib),
        releases={
            "hooks": Releases(3, gib, 0.5, given_up=True),
            "cache": Releases(2, 5 * gib, 0.25),
        },
        run_history=RunHistory(
            (1, 5, 10),
            (0.0, 4.0, 9.5),
            (30 * gib, 34 * gib, 39 * gib),
            (43 * gib, 46 * gib, 51 * gib),
            (None, 12 * gib, 12 * gib),
            (gib, gib, gib),
            (9 * gib, 14 * gib, 18 * gib),
            {"parameters": 8 * gib, "held": gib},
            {"parameters": 8 * gib, "held": 10 * gib},
        ),
        growth=Growth("kept", float(gib), 1, 9 * gib, "held", is_leak=True),
        engine=Engine(
            "vllm",
            {"weights": gib},
            {"kv_cache": 4 * gib},
            {"activations": 2 * gib, "kv_cache": 4 * gib},
            {"activations": gib},
            5 * gib,
            4,
            (gib, 2 * gib, 3 * gib, 4 * gib),
            gib,
        ),
        communicators={
            "default_pg": Communicator(gib // 8, gib // 2, idle_since=1_700_000_180.0),
            "tp": Communicator(gib // 8, 0, gib // 2),
            "dp": Communicator(gib // 4, is_counted=False),
        },
        rmm=RmmMemory(2 * gib, gib, 3 * gib // 2),
    )
    process = Process(
        pid=pid,
        pid_namespace=None,
        start_ticks=None,
        hostname="node1",
        run=run,
        rank=rank,
        local_rank=rank,
        world_size=8,
        script="train.py",
        labels={"slurm_job_id": "77"},
        versions={"torch": "2.13.0"},
        start_timestamp=1_700_000_000.0,
        launch="1000-3f9a2c71",
    )
    durations = tuple([0] * 4 + [9] + [0] * (len(STEP_DURATION_BOUNDS) - 4))
    return Sample(
        timestamp=1_700_000_200.0,
        process=process,
        devices=(device,),
        steps=Steps(10, durations, 1.5, 640),
        cost=SelfCost(2e-5, 2e-3, 0.25, {"publish": 1}, 4e-3),
        allocator_settings={"backend": "native", "expandable_segments": "False"},
        settings_ignored={"expandable_segments": True},
        host=HostMemory(6 * gib, 64 * gib, 20 * gib),
        pinned=PinnedMemory(2 * gib, gib, 1_700_000_190.0),
        hooks_dropped={"raised": 1, "slow": 0, "empty": 0},
    )
