"""What is reported about other settings, by replays of a recording from mid-run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.allocator_programs import SETTINGS
from support.late_recordings import ADDRESSES, CONF, late_recording

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB
from torchmem.sample.errors import UsageError
from torchmem.trace.recording import CaptureFacts, Event
from torchmem.whatif.engine import what_if
from torchmem.whatif.mid_run import RestartReplays, decide, switch_refusal
from torchmem.whatif.result import FailedRequest, Fidelity, ReplayResult, Restart

FAITHFUL = Fidelity(100, 100, None, "segment", 10 * GIB, 10 * GIB)
RECORDED = ReplayResult("recorded", "", peak_reserved=10 * GIB, peak_allocated=6 * GIB)
OOM = FailedRequest(90, GIB, 10 * GIB, 6 * GIB, 4 * GIB)
EXPANDABLE, ROUNDED, SPLIT = (
    "expandable_segments:True",
    "roundup_power2_divisions:4",
    "max_split_size_mb:64",
)


def switched(conf: str, **counts: int) -> ReplayResult:
    """Return a replay of a switch that reserves as much as was recorded, unless `counts` differ."""
    result = replace(RECORDED, name=conf, conf=conf, start="switched")
    return replace(result, **counts)  # type: ignore[arg-type]


def packed(conf: str, peak: int) -> ReplayResult:
    """Return a replay from packed live blocks."""
    return replace(RECORDED, name=conf, conf=conf, start="packed", peak_reserved=peak)


def restart(conf: str, peak: int, packed_default: int, growth: float = 1.0) -> Restart | None:
    """Return what is reported about a restart that has this peak from packed live blocks."""
    replays = RestartReplays(packed("", packed_default), AllocatorConfig(), growth)
    return replays.result(packed(conf, peak), AllocatorConfig.parse(conf))


@pytest.mark.parametrize(
    ("conf", "peak", "packed_default", "said"),
    [
        (EXPANDABLE, 6 * GIB, 7 * GIB, (6 * GIB, None)),
        (EXPANDABLE, 6 * GIB, 10 * GIB, (6 * GIB, None)),
        (SPLIT, 6 * GIB, 7 * GIB, (None, "less")),
        (SPLIT, 7 * GIB, 7 * GIB, (None, "same")),
        (SPLIT, 8 * GIB, 7 * GIB, (None, "more")),
        (SPLIT, 8 * GIB, 10 * GIB, (None, "less")),
        (ROUNDED, 6 * GIB, 7 * GIB, (None, "less")),
        (ROUNDED, 8 * GIB, 7 * GIB, None),
        (ROUNDED, 8 * GIB, 10 * GIB, (None, "less")),
        (f"{EXPANDABLE},{ROUNDED}", 6 * GIB, 7 * GIB, None),
        (f"{EXPANDABLE},{ROUNDED}", 6 * GIB, 10 * GIB, None),
    ],
)
def test_only_what_holds_is_said_of_a_restart(
    conf: str, peak: int, packed_default: int, said: tuple[int | None, str | None] | None
) -> None:
    """A number for expandable segments, a direction for splitting, and "less" for rounding."""
    result = restart(conf, peak, packed_default)
    assert said == (None if result is None else (result.peak_reserved, result.direction))


def test_an_estimate_grows_with_the_peak_before_the_trace() -> None:
    """If more was allocated before the trace, a restart reserves proportionally more."""
    grown = restart(EXPANDABLE, 6 * GIB, 7 * GIB, growth=1.25)
    assert grown is not None
    assert grown.peak_reserved == 7.5 * GIB


def test_a_restart_that_saves_is_recommended_against_the_recorded_peak() -> None:
    """An estimate that is much lower than what was recorded is a change, a little lower is not."""
    for peak, decision in ((7 * GIB, "change"), (9.5 * GIB, "keep"), (11 * GIB, "keep")):
        restarts = [Restart(EXPANDABLE, EXPANDABLE, int(peak)), Restart(SPLIT, SPLIT, None, "less")]
        verdict = decide(FAITHFUL, RECORDED, [switched(EXPANDABLE)], restarts)
        assert decision == verdict.decision
    verdict = decide(FAITHFUL, RECORDED, [], [Restart(EXPANDABLE, EXPANDABLE, 7 * GIB)])
    assert "estimated to be 30% lower" in verdict.sentence
    assert verdict.recommended == EXPANDABLE


def test_a_direction_alone_is_no_recommendation() -> None:
    """Without a number, a setting that may reserve less is not recommended."""
    verdict = decide(FAITHFUL, RECORDED, [switched(ROUNDED)], [Restart(SPLIT, SPLIT, None, "less")])
    assert (verdict.decision, verdict.recommended) == ("keep", None)


def test_a_switch_that_prevents_the_oom_comes_first() -> None:
    """Of a run that failed, the exact answer counts more than an estimate."""
    failed = replace(RECORDED, oom=OOM, ooms=1, retries=3)
    restarts = [Restart(EXPANDABLE, EXPANDABLE, 7 * GIB)]
    verdict = decide(FAITHFUL, failed, [switched(EXPANDABLE), switched(ROUNDED)], restarts)
    assert (verdict.recommended, verdict.decision) == (EXPANDABLE, "change")
    assert "the requests that failed would have succeeded" in verdict.sentence
    assert any("After a restart" in reason for reason in verdict.reasons)

    hopeless = [replace(switched(EXPANDABLE), oom=OOM, ooms=1)]
    verdict = decide(FAITHFUL, failed, hopeless, [])
    assert verdict.decision == "keep"
    assert "Request less memory" in verdict.sentence


def test_without_fidelity_nothing_is_said() -> None:
    """The verdict is the reason."""
    verdict = decide(replace(FAITHFUL, reason="it differs."), RECORDED, [], [])
    assert (verdict.decision, verdict.sentence) == ("none", "No recommendation: it differs.")


@pytest.mark.parametrize(
    ("conf", "refused"),
    [
        (EXPANDABLE, False),
        (ROUNDED, False),
        ("garbage_collection_threshold:0.8", False),
        (SPLIT, True),
        (f"{EXPANDABLE},{SPLIT}", True),
        ("per_process_memory_fraction:0.9", True),
        ("large_segment_size_mb:40", True),
    ],
)
def test_settings_that_no_running_process_can_switch_are_refused(conf: str, refused: bool) -> None:
    """The refusal is one sentence."""
    reason = switch_refusal(AllocatorConfig(), AllocatorConfig.parse(conf))
    assert refused == (reason is not None)


def test_the_facts_of_a_capture_are_used() -> None:
    """Its version, GPU and peak decide the order of blocks, the limit and the estimate."""
    setting = SETTINGS["small_blocks"]
    recording = late_recording(setting, "block", "descending", 3, 0.5)
    segments = sum(segment.total_size for segment in recording.segments)
    facts = CaptureFacts(
        torch_version="2.12.1+cu130",
        total_bytes=setting.gpu + 512 * MIB,
        limit_bytes=setting.gpu + 512 * MIB,
        free_bytes=setting.gpu - segments,
        reserved_bytes=segments,
        allocated_peak_bytes=100 * GIB,
    )
    plain, captured = (
        what_if(replace(recording, facts=each), settings=[EXPANDABLE])
        for each in (CaptureFacts(), facts)
    )
    assert captured.fidelity.block_order == "block"
    assert ("oom" if captured.gpu_source == "oom" else "capture") == captured.gpu_source
    estimates = [
        each.peak_reserved or 0 for answer in (plain, captured) for each in answer.restarts
    ]
    assert estimates[1:] > estimates[:1]
    assert any("How much memory was allocated before" in caveat for caveat in plain.caveats)
    assert not any("was allocated before" in caveat for caveat in captured.caveats)


def damaged(events: tuple[Event, ...], chance: random.Random) -> tuple[Event, ...]:
    """Return events of which some are lost, repeated, moved, or have other numbers."""
    changed = list(events)
    for _ in range(chance.randrange(1, 30)):
        place = chance.randrange(len(changed))
        other = changed[chance.randrange(len(changed))]
        match chance.randrange(5):
            case 0:
                del changed[place]
            case 1:
                changed.insert(place, other)
            case 2:
                changed[place] = replace(changed[place], address=other.address)
            case 3:
                size = chance.choice([1, 512, other.size or 1, 21 * MIB, 1 << 45])
                changed[place] = replace(changed[place], size=size)
            case _:
                changed[place] = replace(changed[place], action=other.action, device_free=0)
    return tuple(changed)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SETTINGS)), st.sampled_from(ADDRESSES), st.integers(0, 10_000))
@example("max_split", "reuse", 5926)  # a free oversize block beside one in use
@example("fraction", "reuse", 47)  # a segment ends while a block seems to be in use
def test_damaged_recordings_are_no_traceback(name: str, addresses: str, seed: int) -> None:
    """Whatever the events are, there is an answer or one sentence."""
    setting = SETTINGS[name]
    recording = late_recording(setting, "segment", addresses, seed, 0.5)
    events = damaged(recording.events, random.Random(seed))
    try:
        answer = what_if(
            replace(recording, events=events, settings={CONF: setting.conf}), settings=[EXPANDABLE]
        )
    except UsageError:
        return
    assert answer.verdict.sentence
