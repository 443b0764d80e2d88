"""What the flags of `torchmem whatif` ask for.

A line on stderr that says how far a long replay is; nothing where stderr is no terminal.

A what-if answer as JSON; its shape is described in docs/whatif.md.

A what-if answer as plain text for a terminal of 100 columns.

From one snapshot file to what is printed and drawn about it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from torchmem.allocator.sizes import format_size
from torchmem.cli.terminal import StatusLine, aligned, bar, wrapped, write_out
from torchmem.recording import read
from torchmem.recording.recording import Recording
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.simulator.card import CONTEXT_BYTES
from torchmem.whatif.engine import what_if
from torchmem.whatif.result import Fidelity, ReplayResult, TimelinePoint, WhatIf


@dataclass(frozen=True, slots=True)
class Options:
    """Flags, checked. `card_bytes`: None when it is to be found in the trace."""

    device: int | None
    card_bytes: int | None
    settings: Sequence[str]
    plot: Path | None
    json: bool


class Progress(StatusLine):
    """Called with events done and in all."""

    def __init__(
        self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`label`: what is being replayed."""
        super().__init__(stream, clock)
        self._label = label[:30]

    def __call__(self, done: int, total: int) -> None:
        """Draw, unless the replay is young, the last line is fresh, or nobody looks."""
        self.show(lambda: bar(self._label, done, total))


SCHEMA = 1


def document(result: WhatIf) -> str:
    """One line of JSON."""
    return json.dumps({"schema": SCHEMA} | whatif_values(result), ensure_ascii=True) + "\n"


def whatif_values(result: WhatIf) -> dict[str, Any]:
    """The fields of `WhatIf` with what they imply, the timelines as one list for each column."""
    values: dict[str, Any] = asdict(result)
    values["fidelity"] |= {"share": result.fidelity.share, "trusted": result.fidelity.trusted}
    values["outcomes"] = [_outcome(outcome) for outcome in result.outcomes]
    return values


def _outcome(outcome: ReplayResult) -> dict[str, Any]:
    if outcome.refused is not None:
        return {"name": outcome.name, "conf": outcome.conf, "refused": outcome.refused}
    columns = {
        column.name: [getattr(moment, column.name) for moment in outcome.timeline]
        for column in fields(TimelinePoint)
    }
    return asdict(outcome) | {"sufficient": outcome.sufficient, "timeline": columns}


HEADINGS = (
    ("", "peak", "peak", "stranded", "", "", "device"),
    ("  settings", "reserved", "allocated", "at worst", "retries", "OOM", "allocs"),
)
MOST_CAVEATS = 3
_MARK = "* "


def page(result: WhatIf) -> str:
    """Everything about one device of one snapshot."""
    sections = [
        wrapped(_headline(result)),
        wrapped(trust(result.fidelity)),
        [] if result.verdict.decision == "none" else list(table(result)),
        list(verdict(result)),
        list(_caveats(result)),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(result: WhatIf) -> str:
    card = "size of the card unknown (tell it with --card to see retries and OOMs)"
    if result.card_bytes is not None:
        card = f"{format_size(result.card_bytes)} for PyTorch{_source(result)}"
    return f"{sanitize_text(result.name)}, GPU {result.device}: {result.events:,} events, {card}"


def _source(result: WhatIf) -> str:
    return {
        "oom": " (from the OOM in the trace)",
        "given": " (--card, less the CUDA context)",
        None: "",
    }[result.card_source]


def trust(fidelity: Fidelity) -> str:
    """How far the replay can be trusted, in words."""
    landed = f"{fidelity.landed:,} of {fidelity.allocations:,} allocations"
    recorded, replayed = (
        format_size(fidelity.recorded_peak_reserved),
        format_size(fidelity.replayed_peak_reserved),
    )
    peak = f"the most memory reserved is {replayed}, as recorded"
    if replayed != recorded:
        peak = f"the most memory reserved is {replayed} instead of {recorded}"
    words = (
        f"Replayed under the recorded settings, {landed} ({_percent(fidelity.share)}) get the recorded address, and "
        f"{peak}"
    )
    return f"{words}: the replay repeats the recording." if fidelity.trusted else f"{words}."


def _percent(share: float) -> str:
    """Never 100 % unless all."""
    return "100%" if share == 1 else f"{min(share, 0.9999):.2%}"


def table(result: WhatIf) -> Iterator[str]:
    """What each setting would have done, the recommended one marked."""
    replayed = [outcome for outcome in result.outcomes if outcome.refused is None]
    yield from aligned([*HEADINGS, *(_row(result, outcome) for outcome in replayed)])
    for outcome in result.outcomes:
        if outcome.refused is not None:
            yield from wrapped(f"{outcome.name}: not replayed. {outcome.refused}", "  ")


def _row(result: WhatIf, outcome: ReplayResult) -> tuple[str, ...]:
    known = result.card_bytes is not None or outcome.ooms or outcome.retries
    mark = _MARK if outcome.name == result.verdict.recommended else "  "
    return (
        mark + outcome.name,
        format_size(outcome.peak_reserved),
        format_size(outcome.peak_allocated),
        format_size(outcome.worst_stranded),
        f"{outcome.retries:,}" if known else "?",
        _oom(result, outcome) if known else "?",
        f"{outcome.device_allocs:,}",
    )


def _oom(result: WhatIf, outcome: ReplayResult) -> str:
    if outcome.oom is None:
        return "no"
    share = outcome.oom.event / result.events if result.events else 1.0
    return f"at {share:.0%}"


def verdict(result: WhatIf) -> Iterator[str]:
    """What to do, what to type, and what speaks for it."""
    found = result.verdict
    yield from wrapped(found.sentence)
    if found.line:
        yield f"    {found.line}"
    for reason in found.reasons:
        yield from wrapped(reason, "  - ")


def _caveats(result: WhatIf) -> Iterator[str]:
    """The gravest; those that hold for every replay come last."""
    if result.caveats:
        yield "Bear in mind"
    for caveat in result.caveats[:MOST_CAVEATS]:
        yield from wrapped(caveat, "  - ")
    if len(result.caveats) > MOST_CAVEATS:
        yield f"  ({len(result.caveats) - MOST_CAVEATS} more with --json)"


def answer(path: Path, options: Options, *, is_first: bool) -> bool:
    """Print the answer for each device of a snapshot; whether there was a verdict for all. Raises UsageError.

    A page that is not the first one begins with an empty line.
    """
    recordings = _selected(read(path), path, options)
    decided = True
    for number, recording in enumerate(recordings):
        with Progress(f"replaying {sanitize_text(recording.name)}") as progress:
            result = what_if(
                recording,
                card_bytes=None
                if options.card_bytes is None
                else options.card_bytes - CONTEXT_BYTES,
                total_bytes=options.card_bytes,
                settings=options.settings or None,
                progress=progress,
            )
        write_out(
            document(result) if options.json else "\n" * (number > 0 or not is_first) + page(result)
        )
        if options.plot:
            _draw(result, options.plot)
        decided &= result.verdict.decision != "none"
    return decided


def _draw(result: WhatIf, path: Path) -> None:
    from torchmem.whatif import plot

    if result.verdict.decision == "none":
        print(
            "torchmem: no picture is drawn, as the replay does not repeat the recording.",
            file=sys.stderr,
        )
    else:
        plot.draw(result, path)


def _selected(recordings: Sequence[Recording], path: Path, options: Options) -> Sequence[Recording]:
    devices = ", ".join(str(recording.device) for recording in recordings)
    if options.device is not None:
        recordings = [recording for recording in recordings if recording.device == options.device]
        if not recordings:
            raise UsageError(
                f"{sanitize_text(str(path))} holds no allocation trace of GPU {options.device}: choose with --device among "
                f"{devices}."
            )
    if options.plot and len(recordings) > 1:
        raise UsageError(f"--plot draws one GPU: choose with --device among {devices}.")
    return recordings
