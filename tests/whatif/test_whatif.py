"""The what-if on programs whose truth is known, because the simulator itself can run them under each setting."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocator_programs import SETTINGS, Operation, Programmer, Simulated
from support.recording_allocator import RecordingAllocator, RecordingCard

from torchmem.allocator.settings import LAST_PARSED, AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.recording import read
from torchmem.recording.recording import Recording
from torchmem.sample.errors import UsageError
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.whatif.engine import CardMemory, on_cards, what_if
from torchmem.whatif.result import ReplayResult

CONF = LAST_PARSED.upper()
CARD_BYTES = 100 * MIB
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
    conf: str, card_bytes: int, *, oldest_first: bool = True
) -> RecordingAllocator:
    """An allocator under these settings, with its history on."""
    card = RecordingCard(card_bytes)
    return RecordingAllocator(card, AllocatorConfig.parse(conf), oldest_segment_first=oldest_first)


def play(allocator: RecordingAllocator, program: Program) -> Program:
    """Run a program; the steps that a trace shows: an empty_cache that gives nothing back is not among them."""
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
            # Cache given back right before a request on a full card would look like a retry.
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


def told(outcome: ReplayResult) -> tuple[int, ...]:
    """What a replay counted."""
    return (
        outcome.peak_reserved, outcome.peak_allocated, outcome.retries, outcome.ooms,
        outcome.device_allocs, outcome.device_frees,
    )  # fmt: skip


def truth(allocator: RecordingAllocator) -> tuple[int, ...]:
    """The same of an allocator that ran the program itself."""
    stats = allocator.stats
    return (
        stats.reserved_bytes.peak, stats.allocated_bytes.peak, stats.num_alloc_retries, stats.num_ooms,
        stats.num_device_alloc, stats.num_device_free,
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(programs, st.sampled_from(CONFS), st.booleans())
def test_a_whole_recording_foretells_every_setting(
    program: Program, conf: str, newer: bool
) -> None:
    """From a trace of the whole program its run under other settings follows to the byte, on a card of any size."""
    recorded = recording_allocator(conf, 100 * CARD_BYTES, oldest_first=newer)
    seen = play(recorded, program)
    for card in (100 * CARD_BYTES, CARD_BYTES):
        answer = what_if(recorded.recording({CONF: conf}), card_bytes=card, settings=CONFS)
        if not answer.fidelity.allocations:
            continue
        assert 1.0 == answer.fidelity.share
        rule = answer.fidelity.oldest_segment_first
        assert rule in (newer, None)
        for outcome in answer.outcomes[1:]:
            real = recording_allocator(outcome.conf, card, oldest_first=rule is not False)
            play_steps(real, seen)
            assert truth(real) == told(outcome)


@settings(max_examples=20, deadline=None)
@given(
    programs,
    st.sampled_from(CONFS),
    st.lists(st.integers(1, 100 * CARD_BYTES), min_size=1, max_size=5),
)
def test_a_whole_recording_foretells_every_card(
    program: Program, conf: str, sizes: list[int]
) -> None:
    """On cards of any size, given in any order, its run under the recorded settings follows to the byte."""
    recorded = recording_allocator(conf, 100 * CARD_BYTES)
    seen = play(recorded, program)
    recording = recorded.recording({CONF: conf})
    answer = what_if(recording, card_bytes=100 * CARD_BYTES, settings=())
    cards = [
        CardMemory(str(size), size, size)
        for size in (*sizes, recorded.stats.reserved_bytes.peak or 1)
    ]
    own = CardMemory("own", 100 * CARD_BYTES, 100 * CARD_BYTES)
    for card, outcome in zip(cards, on_cards(recording, own, cards, answer), strict=True):
        real = recording_allocator(conf, card.total)
        play_steps(real, seen)
        assert (card.name, truth(real)) == (outcome.name, told(outcome))


class PlainPools(Programmer):
    """Makes pools that neither help out nor keep blocks whole, which no snapshot tells."""

    def _make_pool(self) -> Operation:
        name, pool, *_ = super()._make_pool()
        self.overflow = 0
        return [name, pool, 0, 0]


def random_recording(name: str, operations: int, part: float = 1) -> Recording:
    """The last part of what a random program under one of the settings leaves in the history."""
    setting = SETTINGS[name]
    simulated = Simulated(setting)
    allocator = recording_allocator(setting.conf, setting.card)
    allocator.set_memory_fraction(
        min(setting.fraction, allocator.config.per_process_memory_fraction)
    )
    simulated.allocator = allocator
    simulated.card = allocator.card  # type: ignore[assignment]
    programmer = PlainPools(setting, random.Random(name))
    for _ in range(operations):
        operation = programmer.next()
        programmer.learn(operation, simulated.run(operation))
    events = allocator.events[round(len(allocator.events) * (1 - part)) :]
    return allocator.recording({CONF: setting.conf}, events)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_repeated(name: str) -> None:
    """With streams, events, pools, retries, OOMs and releases of the cache every allocation lands on its address."""
    setting = SETTINGS[name]
    # The garbage collection counts in shares of the limit, of which an OOM tells only about how much it is.
    limit = int(setting.fraction * setting.card) if setting.fraction < 1 else None
    fidelity = what_if(random_recording(name, 1200), card_bytes=limit, settings=()).fidelity
    # Of the collected garbage of private pools a trace does not tell enough.
    missed = 0.01 * fidelity.allocations if name == "pools_roundup" else 0
    assert fidelity.allocations - fidelity.landed <= missed
    assert fidelity.recorded_peak_reserved == fidelity.replayed_peak_reserved
    assert fidelity.allocations > 250


FRAGMENTING_CARD = 1200 * MIB


def fragmenting(allocator: RecordingAllocator) -> None:
    """Tensors that stay take the better half of segments that larger ones left, and nothing needs the other half."""
    for block in [allocator.malloc(40 * MIB) for _ in range(24)]:
        allocator.free(block)
    for _ in range(24):
        allocator.malloc(21 * MIB)
    allocator.malloc(300 * MIB)


def fragmented() -> Recording:
    """The trace of a program that fails although a good part of the card is free."""
    allocator = recording_allocator("", FRAGMENTING_CARD)
    with pytest.raises(OutOfMemoryError):
        fragmenting(allocator)
    return allocator.recording({CONF: ""})


def test_expandable_segments_are_recommended_where_they_save_the_run() -> None:
    """A run that dies of fragmentation is told the one line that serves the request, and why."""
    answer = what_if(fragmented())
    by_name = {outcome.name: outcome for outcome in answer.outcomes}
    recorded = by_name["recorded"]

    assert (FRAGMENTING_CARD, "oom") == (answer.card_bytes, answer.card_source)
    assert recorded.oom is not None
    assert ("fragmentation", "stranded", 300 * MIB) == (
        recorded.oom.cause, recorded.oom.detail, recorded.oom.requested)  # fmt: skip
    assert recorded.oom.event == answer.events - 1
    assert by_name["expandable segments"].oom is None
    assert ("change", "expandable segments") == (
        answer.verdict.decision,
        answer.verdict.recommended,
    )
    assert answer.verdict.line == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    allocator = recording_allocator("expandable_segments:True", FRAGMENTING_CARD)
    fragmenting(allocator)
    assert allocator.stats.num_ooms == 0


def test_where_nothing_helps_the_settings_stay() -> None:
    """A run that asks for more than the card has is told to keep its settings and ask for less."""
    allocator = recording_allocator("", CARD_BYTES)
    for _ in range(3):
        allocator.malloc(30 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB)
    answer = what_if(allocator.recording({CONF: ""}))
    assert ("keep", None, None) == (
        answer.verdict.decision,
        answer.verdict.recommended,
        answer.verdict.line,
    )
    assert "smaller batch" in answer.verdict.sentence


def test_a_trace_that_cannot_be_repeated_gets_no_verdict() -> None:
    """When other addresses come out than were recorded, it is said so and nothing is recommended."""
    recording = fragmented()
    moved = tuple(
        replace(event, address=event.address + MIB) if event.action == "alloc" else event
        for event in recording.events
    )
    answer = what_if(replace(recording, events=moved))
    assert not answer.fidelity.trusted
    assert "none" == answer.verdict.decision
    assert ["recorded"] == [outcome.name for outcome in answer.outcomes]
    assert "No recommendation" in answer.verdict.sentence


def test_a_trace_from_the_middle_is_judged_from_one_start() -> None:
    """When tensors were alive before the trace, the recorded settings start the same way as the others."""
    recording = fragmented()
    answer = what_if(replace(recording, events=recording.events[60:]))
    assert 1.0 == answer.fidelity.share
    assert ["recorded", "recorded, packed"] == [outcome.name for outcome in answer.outcomes[:2]]
    assert {"packed"} == {outcome.start for outcome in answer.outcomes[1:]}
    assert any("does not begin with the program" in caveat for caveat in answer.caveats)


def test_without_a_card_no_setting_runs_out_of_memory() -> None:
    """A trace without OOM on a card of unknown size tells what each setting needs, and says so."""
    allocator = recording_allocator("", 100 * FRAGMENTING_CARD)
    fragmenting(allocator)
    answer = what_if(allocator.recording({CONF: ""}))
    assert answer.card_bytes is None
    assert answer.outcomes[0].sufficient == allocator.stats.reserved_bytes.peak
    assert {"garbage collection"} == {
        outcome.name for outcome in answer.outcomes if outcome.refused
    }
    assert "not known" in answer.caveats[0]


def test_settings_that_pytorch_refuses_are_not_replayed() -> None:
    """A setting that would stop the program at its start is reported with PyTorch's reason."""
    answer = what_if(fragmented(), settings=("max_split_size_mb:16", "max_split_size_mb:64"))
    _, refused, tried = answer.outcomes
    assert "max_split_size_mb must be 20 or more." == refused.refused
    assert tried.refused is None


def test_progress_grows_towards_its_end() -> None:
    """Progress never falls, and never passes the number of events of all replays, which stays the same."""
    seen: list[tuple[int, int]] = []
    what_if(fragmented(), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert 0 < seen[-1][0] <= seen[-1][1]
    assert 1 == len({total for _, total in seen})


def test_a_card_without_memory_is_refused() -> None:
    """A size that no card has is the caller's mistake."""
    with pytest.raises(UsageError):
        what_if(fragmented(), card_bytes=0)


@pytest.mark.parametrize("name", ["training_256", "forward_bf16_128", "forward_fp32_128", "small"])
def test_recordings_of_real_gpus_are_repeated(name: str, root: Path) -> None:
    """Every allocation of traces that others recorded on real GPUs lands on its address."""
    path = root.parent / "shared" / "snapshots" / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshot at {path}")
    for recording in read(path):
        answer = what_if(recording, settings=())
        assert answer.fidelity.allocations
        assert 1.0 == answer.fidelity.share
        assert answer.fidelity.oldest_segment_first is not True


def test_a_smaller_card_is_judged_by_your_settings_on_it() -> None:
    """What ran on a larger card is replayed on the given one under its own settings, where it fails as it would."""
    allocator = recording_allocator("", 100 * FRAGMENTING_CARD)
    fragmenting(allocator)
    answer = what_if(
        allocator.recording({CONF: ""}),
        card_bytes=FRAGMENTING_CARD,
        settings=["expandable_segments:True"],
    )
    recorded, here, expandable = answer.outcomes
    assert ("recorded", None) == (recorded.name, recorded.oom)
    assert here.oom is not None
    assert ("recorded, this card", 300 * MIB) == (here.name, here.oom.requested)
    assert expandable.name == answer.verdict.recommended


@pytest.mark.parametrize("size", [1, MIB // 2, 1 << 62, 1 << 44])
def test_pages_that_no_pytorch_maps_are_refused(size: int) -> None:
    """A stranger's trace may claim any mapping: one sentence, and no memory or time spent on what it claims."""
    recording = fragmented()
    wild = [
        replace(recording.events[0], action=action, size=size)
        for action in ("segment_map", "segment_unmap")
    ]
    with pytest.raises(UsageError, match="damaged"):
        what_if(replace(recording, events=(*recording.events, *(wild * 20))))
