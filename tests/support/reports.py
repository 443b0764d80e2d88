"""OOM reports for tests: hypothesis strategies, and one for each kind of OOM on an 80 GB GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

from hypothesis import strategies as st
from support import samples

from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.call_stack import CallStack, Frame, Origin
from torchmem.explain.garbage import Garbage, GarbageType
from torchmem.explain.lines import LinePart, Lines, LineUse
from torchmem.explain.oom_report import OomReport, OomTrend
from torchmem.explain.verdict import Change, Gain, OnsetEvidence, Verdict
from torchmem.sample.run_history import RunHistory
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    ONSETS,
    OOM_CAUSES,
    Allocator,
    BlockCounts,
    ByPool,
    Counters,
    DeviceSample,
    Layout,
    OomRecord,
    Process,
    Steps,
)

GIB = 1 << 30
MIB = 1 << 20
NOW = 1_790_000_000.0


@st.composite
def trends(draw: st.DrawFn) -> OomTrend:
    """Draw a trend whose columns have the same length and may contain None."""
    length = draw(st.integers(0, 5))
    optional_size = st.none() | samples.size
    columns = {
        column.name: tuple(draw(st.lists(optional_size, min_size=length, max_size=length)))
        for column in fields(OomTrend)
    }
    seconds = tuple(float(length - index) for index in range(length))
    ratios = tuple(draw(st.lists(st.none() | st.floats(0, 1), min_size=length, max_size=length)))
    trend = OomTrend(**columns)  # type: ignore[arg-type]
    return replace(trend, seconds=seconds, fragmentation_ratio=ratios, steps=tuple(range(length)))


frames = st.builds(
    Frame,
    st.sampled_from(["/home/ann/gpt/train.py", "<stdin>", "/v/site-packages/torch/nn/a.py", ""]),
    st.none() | st.integers(0, 1 << 31),
    st.text(max_size=5),
    st.sampled_from([None, "torch", "python", "transformers"]),
)
stacks = st.builds(CallStack, st.lists(frames, max_size=9).map(tuple), st.integers(0, 9))
origins = st.builds(
    Origin,
    stacks,
    st.none() | stacks,
    st.sampled_from([None, "loader"]),
    st.sampled_from([None, "", "MmBackward0"]),
    st.sampled_from([None, "rollout"]),
)
parts = st.builds(
    LinePart,
    samples.size,
    samples.count,
    st.lists(frames, max_size=3).map(tuple),
    st.none() | st.text(max_size=9),
)
uses = st.lists(
    st.builds(
        LineUse,
        frames,
        samples.size,
        samples.count,
        st.lists(parts, max_size=3).map(tuple),
        st.booleans(),
    ),
    max_size=4,
).map(tuple)
tensors = st.builds(
    TensorGroup,
    samples.count,
    st.none() | st.lists(samples.count, max_size=4).map(tuple),
    st.none() | st.sampled_from(["float32", "int64"]),
    samples.size,
)
garbage = st.builds(
    Garbage,
    samples.size,
    st.lists(
        st.builds(GarbageType, st.text(max_size=9), samples.count, st.booleans()), max_size=3
    ).map(tuple),
    st.none() | frames,
    st.booleans(),
)
positive = st.none() | st.floats(1, 1e15)
gains = st.builds(Gain, st.sampled_from(get_args(Change)), samples.size, positive, st.booleans())
whys = st.builds(
    OnsetEvidence,
    st.sampled_from(ONSETS),
    st.none() | samples.size,
    positive,
    st.none() | samples.count,
    st.sampled_from([None, "held", "kv_cache"]),
    st.sampled_from([None, "evaluate()"]),
)
verdicts = st.builds(
    Verdict,
    st.sampled_from(OOM_CAUSES),
    st.none(),
    st.none() | whys,
    st.lists(gains, max_size=3).map(tuple),
)
reports = st.builds(
    OomReport,
    timestamp=samples.seconds,
    process=samples.processes,
    device=samples.devices,
    oom=samples.ooms,
    driver_free_bytes=samples.size,
    limit_bytes=st.none() | samples.size,
    layout=st.none() | samples.layouts,
    layout_before=st.none() | samples.layouts,
    steps=samples.steps,
    allocator_settings=st.dictionaries(
        st.sampled_from(["expandable_segments", "max_split_size", "garbage_collection_threshold"]),
        samples.text,
    ),
    trend=trends(),
    origin=st.none() | origins,
    lines=st.none()
    | st.builds(Lines, uses, samples.size, samples.size, uses, st.integers(0, 1 << 30)),
    tensors=st.lists(tensors, max_size=4).map(tuple),
    survived=st.booleans(),
    gradients_enabled=st.none() | st.booleans(),
    garbage=st.none() | garbage,
    last_error_bytes=st.none() | samples.size,
    verdict=st.none() | verdicts,
)


def _layout(
    timestamp: float, releasable: int, stranded: int, largest: int, private_free: int = 0
) -> Layout:
    return Layout(
        timestamp=timestamp,
        segments=ByPool(40, 200),
        blocks=BlockCounts(ByPool(900, 1200), ByPool(0, 0), ByPool(40, 300)),
        releasable_bytes=releasable,
        stranded_bytes=stranded,
        largest_free_block_bytes=largest,
        free_block_counts=(0,) * (len(FREE_BLOCK_BOUNDS) + 1),
        private_used_bytes=private_free,
        private_free_bytes=private_free,
        headroom_bytes=0,
        headroom_flush_bytes=largest,
    )


def _trend(reserved: int) -> OomTrend:
    """Return five minutes in which allocated memory and the cache grow."""
    sizes = [30 * GIB + index * 512 * MIB for index in range(30)]
    return OomTrend(
        seconds=tuple(290.0 - 10 * index for index in range(30)),
        allocated_bytes=tuple(sizes),
        reserved_bytes=tuple(min(reserved, size + 8 * GIB) for size in sizes),
        active_bytes=tuple(sizes),
        stranded_bytes=tuple(index * 256 * MIB for index in range(30)),
        fragmentation_ratio=(0.5,) * 30,
        headroom_bytes=tuple(40 * GIB - index * GIB for index in range(30)),
        alloc_retries=tuple(index // 10 for index in range(30)),
        steps=tuple(100 + 10 * index for index in range(30)),
    )


def _report(
    oom: OomRecord, *, allocated: int, stranded: int, driver_free: int, largest: int = 0
) -> OomReport:
    reserved = allocated + stranded
    used, held, free = ByPool(0, allocated), ByPool(0, reserved), ByPool(0, stranded)
    device = DeviceSample(
        index=0,
        uuid=samples.UUID,
        name="NVIDIA H100 80GB HBM3",
        total_bytes=80 * GIB,
        allocator=Allocator(used, used, held, used, free, allocated, allocated, reserved),
        counters=Counters(alloc_retries=3, ooms={oom.cause: 1}),
        last_oom=oom,
    )
    process = Process(
        pid=4242,
        pid_namespace=1,
        start_ticks=77,
        hostname="node1",
        run="night",
        rank=3,
        local_rank=3,
        world_size=8,
        script="train.py",
        versions={"torch": "2.13.0+cu130", "cuda": "13.0"},
    )
    return OomReport(
        timestamp=NOW,
        process=process,
        device=device,
        oom=oom,
        driver_free_bytes=driver_free,
        limit_bytes=None,
        layout=_layout(NOW, 0, stranded, largest),
        layout_before=_layout(NOW - 7, 6 * GIB, stranded, 4 * GIB),
        steps=Steps(390, last_timestamp=NOW - 0.4),
        allocator_settings={"backend": "native", "expandable_segments": "False"},
        trend=_trend(reserved),
    )


_TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
_MAIN = (
    Frame("/home/ann/gpt/train.py", 61, "train"),
    Frame("/home/ann/gpt/train.py", 80, "<module>"),
)
FORWARD = Origin(
    CallStack(
        (
            Frame(f"{_TORCH}/nn/functional.py", 1789, "gelu", "torch"),
            Frame(f"{_TORCH}/nn/modules/module.py", 1778, "Module._wrapped_call_impl", "torch"),
            Frame("/home/ann/gpt/model.py", 88, "MLP.forward"),
            Frame(f"{_TORCH}/nn/modules/module.py", 1789, "Module._call_impl", "torch"),
            Frame(f"{_TORCH}/nn/modules/module.py", 1778, "Module._wrapped_call_impl", "torch"),
            Frame("/home/ann/gpt/model.py", 120, "GPT.forward"),
            *_MAIN,
        )
    ),
    phase="forward",
)
BACKWARD = Origin(
    CallStack(),
    CallStack((Frame(f"{_TORCH}/autograd/graph.py", 979, "_engine_run", "torch"), *_MAIN)),
    backward="MmBackward0",
)
COLLECTIVE = Origin(
    CallStack(
        (
            Frame(f"{_TORCH}/distributed/distributed_c10d.py", 2818, "all_reduce", "torch"),
            Frame("/opt/venv/lib/python3.12/site-packages/trainer/loop.py", 5, "fit", "trainer"),
            *_MAIN,
        ),
        omitted=7,
    )
)

CAPACITY = replace(
    _report(
        OomRecord(NOW, 4 * GIB, "capacity"), allocated=77 * GIB, stranded=512 * MIB, driver_free=GIB
    ),
    origin=BACKWARD,
)
STRANDED = replace(
    _report(
        OomRecord(NOW, 3 * GIB, "fragmentation", "stranded"),
        allocated=62 * GIB,
        stranded=14 * GIB,
        driver_free=2 * GIB,
        largest=640 * MIB,
    ),
    origin=FORWARD,
    lines=Lines(
        (
            LineUse(Frame("/home/ann/gpt/train.py", 66, "log"), 31 * GIB, 412),
            LineUse(Frame("/home/ann/gpt/model.py", 88, "MLP.forward"), 12 * GIB, 96),
        ),
        other_bytes=GIB,
        unknown_bytes=18 * GIB,
        grown=(LineUse(Frame("/home/ann/gpt/train.py", 66, "log"), 29 * GIB, 380),),
        grown_steps=380,
    ),
)
EXPANDABLE = replace(
    STRANDED,
    allocator_settings={
        "backend": "native",
        "expandable_segments": "True",
        "pytorch_cuda_alloc_conf": "expandable_segments:True",
    },
)
STREAM = replace(STRANDED, oom=OomRecord(NOW, 512 * MIB, "fragmentation", "stream"))
POOL = replace(
    STRANDED,
    oom=OomRecord(NOW, 3 * GIB, "fragmentation", "pool"),
    layout=_layout(NOW, 0, GIB, 256 * MIB, 9 * GIB),
)
PENDING = replace(STRANDED, oom=OomRecord(NOW, 512 * MIB, "pending"))
LIBRARY = replace(
    STRANDED,
    oom=OomRecord(NOW, None, "library"),
    layout=_layout(NOW, 9 * GIB, GIB, 4 * GIB),
    origin=COLLECTIVE,
)
SMALL_SEGMENT = replace(
    _report(
        OomRecord(NOW, 20 * MIB, "fragmentation", "small_segment"),
        allocated=78 * GIB,
        stranded=GIB,
        driver_free=12 * MIB,
        largest=2 * MIB,
    ),
    process=replace(STRANDED.process, versions={"torch": "2.6.0"}),
)
LIMIT = replace(
    _report(OomRecord(NOW, 4 * GIB, "limit"), allocated=38 * GIB, stranded=0, driver_free=40 * GIB),
    limit_bytes=40 * GIB,
)
STRANDED_LIMIT = replace(
    _report(
        OomRecord(NOW, 3 * GIB, "fragmentation", "stranded"),
        allocated=30 * GIB,
        stranded=8 * GIB,
        driver_free=40 * GIB,
        largest=640 * MIB,
    ),
    limit_bytes=40 * GIB,
)
EXTERNAL = _report(
    OomRecord(NOW, 4 * GIB, "external"), allocated=20 * GIB, stranded=0, driver_free=GIB
)
LARGER = replace(CAPACITY, oom=OomRecord(NOW, 500 * GIB, "capacity"))
BARE = replace(
    CAPACITY,
    device=DeviceSample(0, None, None, None),
    layout=None,
    layout_before=None,
    origin=None,
    lines=None,
    steps=Steps(),
    trend=OomTrend(),
    allocator_settings={},
)


def _judged(report: OomReport, verdict: Verdict) -> OomReport:
    onset = verdict.why.onset if verdict.why else None
    oom = replace(report.oom, cause=verdict.cause, detail=verdict.detail, onset=onset)
    return replace(report, oom=oom, verdict=verdict)


# Each of the first steps is read, and later ones once a second.
_STEPS = (*range(1, 40, 2), *range(50, 390, 40))
_KEPT = tuple(22 * GIB + step * 144 * MIB for step in _STEPS)
_LEAKED = RunHistory(
    _STEPS,
    tuple(0.5 * step for step in _STEPS),
    _KEPT,
    tuple(size + 3 * GIB for size in _KEPT),
    (None,) * len(_STEPS),
    (2 * GIB,) * len(_STEPS),
    (None,) * len(_STEPS),
)
LEAK = _judged(
    replace(CAPACITY, device=replace(CAPACITY.device, run_history=_LEAKED)),
    Verdict(
        "capacity",
        None,
        OnsetEvidence("leak", 55 * GIB, 144.5 * MIB, 7, "held"),
        (Gain("compaction", 500 * MIB, 3.46, matters=False),),
    ),
)
LEAK_AND_STRANDED = _judged(
    STRANDED,
    Verdict(
        "fragmentation",
        "stranded",
        OnsetEvidence("leak", 30 * GIB, 80.0 * MIB, 7, "held"),
        (Gain("compaction", 13 * GIB, 166.4, matters=True),),
    ),
)
_ENCODER = (Frame("/home/ann/gpt/model.py", 120, "GPT.forward"), *_MAIN)
LEAK_WITH_LINES = replace(
    LEAK,
    lines=Lines(
        (
            LineUse(
                Frame("/home/ann/gpt/model.py", 88, "MLP.forward"),
                56 * GIB,
                96,
                (
                    LinePart(40 * GIB, 64, _ENCODER, "encoder.layers.*.linear1"),
                    LinePart(14 * GIB, 32, _ENCODER[1:], "decoder.layers.*"),
                    LinePart(2 * GIB, 32),
                ),
            ),
            LineUse(Frame("/home/ann/gpt/train.py", 66, "log"), GIB, 9),
        ),
        other_bytes=0,
        unknown_bytes=20 * GIB,
        grown=(
            LineUse(Frame("/home/ann/gpt/train.py", 66, "log"), GIB, 9, (LinePart(GIB, 9, _MAIN),)),
            LineUse(Frame("/home/ann/gpt/model.py", 8, "forward"), 56 * MIB, 9),
        ),
        grown_steps=12,
    ),
    tensors=(
        TensorGroup(216, (8, 128, 8000), "float32", 52 * GIB, "output"),
        TensorGroup(12, (), "int64", GIB),
        TensorGroup(1, (4,), "int64", 512),
        TensorGroup(700, None, None, 2 * GIB),
    ),
)
NOT_GROWN = _judged(
    STRANDED,
    Verdict(
        "fragmentation",
        "stranded",
        OnsetEvidence("stranded", 14 * GIB),
        (Gain("compaction", 13 * GIB, None, matters=True),),
    ),
)
GARBAGE = _judged(
    replace(
        CAPACITY,
        garbage=Garbage(
            48 * GIB,
            (GarbageType("Node", 120), GarbageType("ValueError", 3, is_exception=True)),
            Frame("/home/ann/gpt/train.py", 42, "Node.__init__"),
        ),
    ),
    Verdict("capacity", None, OnsetEvidence("garbage", 48 * GIB)),
)
LONGER_BATCHES = _judged(
    CAPACITY, Verdict("capacity", None, OnsetEvidence("larger_step", 31 * GIB, 82.0 * MIB, 7))
)
LONG_BATCH = _judged(CAPACITY, Verdict("capacity", None, OnsetEvidence("larger_step", 9 * GIB)))
FIRST_STEP = _judged(
    replace(CAPACITY, steps=Steps()), Verdict("capacity", None, OnsetEvidence("first_step"))
)
EVALUATION = _judged(
    replace(CAPACITY, origin=FORWARD, gradients_enabled=True),
    Verdict("capacity", None, OnsetEvidence("new_phase", 5 * GIB, phase="evaluate()")),
)
COPY = _judged(
    CAPACITY, Verdict("capacity", None, OnsetEvidence("new_phase", 12 * GIB, since_step=300))
)
OUTSIDE = _judged(
    EXTERNAL,
    Verdict(
        "external",
        None,
        OnsetEvidence("outside", 58 * GIB),
        (Gain("neighbors", 55 * GIB, None, matters=True),),
    ),
)
TIGHT = _judged(CAPACITY, Verdict("capacity", None, OnsetEvidence("tight", 300 * MIB)))

BY_NAME = {
    "capacity": CAPACITY,
    "stranded": STRANDED,
    "expandable": EXPANDABLE,
    "stream": STREAM,
    "pool": POOL,
    "pending": PENDING,
    "library": LIBRARY,
    "small_segment": SMALL_SEGMENT,
    "limit": LIMIT,
    "stranded_limit": STRANDED_LIMIT,
    "external": EXTERNAL,
    "larger": LARGER,
    "bare": BARE,
    "leak": LEAK,
    "leak_with_lines": LEAK_WITH_LINES,
    "leak_and_stranded": LEAK_AND_STRANDED,
    "garbage": GARBAGE,
    "not_grown": NOT_GROWN,
    "longer_batches": LONGER_BATCHES,
    "long_batch": LONG_BATCH,
    "first_step": FIRST_STEP,
    "evaluation": EVALUATION,
    "copy": COPY,
    "outside": OUTSIDE,
    "tight": TIGHT,
}
