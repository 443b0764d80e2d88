"""Settings and cards tried for real on the phantom, where a replay of the trace would not be exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchmem.cli.preflight.attempts import Attempts, failure
from torchmem.cli.preflight.verdict import requested, tightest
from torchmem.cli.preflight.wanted import Wanted
from torchmem.phantom.cards import Card
from torchmem.preflight.outcome import Outcome
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif import result as replay
from torchmem.simulator.whatif.engine import line_to_type
from torchmem.simulator.whatif.settings import Candidate, candidate, grid, recorded_settings
from torchmem.simulator.whatif.verdict import decide


def rerun_settings(
    wanted: Wanted, recording: Recording, asked: Outcome, attempts: Attempts, fidelity: replay.Fidelity
) -> replay.WhatIf:
    """The answer of `what_if` by real runs; events are steps. `asked`: the run under the settings of the recording."""
    recorded = recorded_settings(recording)
    was = as_replay("recorded", recorded.conf, asked)
    others = [_rerun(wanted, one, attempts) for one in _candidates(wanted, recording, recorded)]
    verdict = decide(replace(fidelity, reason=None), was, was, others)
    best = next((other for other in others if other.name == verdict.recommended), None)
    line = None if best is None else line_to_type(recording, best.conf)
    device = tightest(asked)
    return replay.WhatIf(
        recording.name, recording.device, wanted.plan.steps, device.total - device.outside, "given", fidelity,
        (was, *others), replace(verdict, line=line, reasons=()),
    )  # fmt: skip


def rerun_cards(wanted: Wanted, cards: Sequence[Card], attempts: Attempts) -> list[Outcome]:
    """One run for each card, under the settings of the plan; raises what `failure` says of one that ends otherwise."""
    found = []
    for card in cards:
        outcome = attempts.quietly(replace(wanted.plan, card=card), f"phantom {card.name}")
        error = failure(outcome)
        if error is not None:
            raise error
        found.append(outcome)
    return found


def as_replay(name: str, conf: str, outcome: Outcome) -> replay.Outcome:
    """A real run in the words of a replay; its events are steps."""
    if not outcome.devices:
        return replay.Outcome(name, conf, refused="It ended before the script used the card.")
    device = tightest(outcome)
    oom = None
    if outcome.ended == "oom":
        oom = replay.Oom(
            outcome.steps, requested(outcome, None) or 0, device.peak_reserved, device.peak_allocated, device.stranded
        )
    return replay.Outcome(
        name, conf, start="empty", peak_reserved=device.peak_reserved, peak_allocated=device.peak_allocated,
        worst_stranded=device.stranded, retries=device.retries, ooms=device.ooms, oom=oom,
        replayed_events=outcome.steps, device_allocs=device.device_allocs,
        timeline=tuple(
            replay.Moment(step.step, step.peak_reserved, step.peak_allocated, 0) for step in device.steps
        ),
    )  # fmt: skip


def _candidates(wanted: Wanted, recording: Recording, recorded: Candidate) -> list[Candidate]:
    if wanted.settings:
        return [candidate(text or "default", text) for text in dict.fromkeys(wanted.settings)]
    return grid(recording, recorded, card_known=True)


def _rerun(wanted: Wanted, one: Candidate, attempts: Attempts) -> replay.Outcome:
    if one.refused is not None:
        return replay.Outcome(one.name, one.conf, one.refused)
    outcome = attempts.quietly(replace(wanted.plan, alloc_conf=one.conf), f"phantom, {one.name}")
    error = failure(outcome)
    if error is not None:
        return replay.Outcome(one.name, one.conf, refused=f"Under it {error}")
    return as_replay(one.name, one.conf, outcome)
