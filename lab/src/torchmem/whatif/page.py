"""The answer as plain text for a terminal of 100 columns, and the progress of a replay."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TextIO

from torchmem.allocator.sizes import format_size
from torchmem.output.terminal import StatusLine, aligned, joined, wrapped
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.result import Direction, Fidelity, ReplayResult, Restart, WhatIf

HEADINGS = (
    ("", "peak", "peak", "stranded", "", "", "device"),
    ("  settings", "reserved", "allocated", "at worst", "retries", "OOM", "allocs"),
)
MAX_CAVEATS = 3
MAX_LABEL_LENGTH = 30
GPU_SOURCES = {
    "oom": " (from the OOM in the trace)",
    "given": " (--gpu-model, less the CUDA context)",
    "capture": " (as free when the capture began)",
}

DIRECTIONS: dict[Direction, str] = {
    "less": "less than with your settings",
    "same": "about as with your settings",
    "more": "more than with your settings",
}


class Progress(StatusLine):
    """The progress of replays, on stderr."""

    def __init__(
        self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream, clock)
        self._label = label[:MAX_LABEL_LENGTH]

    def __call__(self, done: int, total: int) -> None:
        """Show the progress if an update is due."""
        self.show(lambda: self._label, done, total)


def page(result: WhatIf) -> str:
    """Return the whole answer for one device of one snapshot."""
    sections = [
        wrapped(_headline(result)),
        wrapped(trust(result.fidelity)),
        [] if result.verdict.decision == "none" else list(table(result)),
        list(restarts(result)),
        list(recommendation(result)),
        list(_caveats(result)),
    ]
    return joined(sections)


def trust(fidelity: Fidelity) -> str:
    """Return how far the replay can be trusted, in words."""
    landed = f"{fidelity.landed:,} of {fidelity.allocations:,} allocations"
    recorded = format_size(fidelity.recorded_peak_reserved)
    replayed = format_size(fidelity.replayed_peak_reserved)
    matches = "as recorded" if replayed == recorded else f"instead of {recorded}"
    sentence = (
        f"Replayed under the recorded settings, {landed} ({_percent(fidelity.share)}) get their "
        f"recorded address, and peak reserved memory is {replayed}, {matches}"
    )
    if fidelity.trusted:
        return f"{sentence}: the replay reproduces the recording."
    return f"{sentence}."


def table(result: WhatIf) -> Iterator[str]:
    """Return what each setting would have done, with a mark at the recommended one."""
    replayed = [replay for replay in result.outcomes if replay.refused is None]
    if any(replay.start == "switched" for replay in replayed):
        yield "Switched in the running process where the trace begins:"
    largest = max((replay.peak_reserved for replay in replayed), default=0)
    yield from aligned([*HEADINGS, *(_row(result, replay, largest) for replay in replayed)])
    refused = defaultdict[str, list[str]](list)
    for replay in result.outcomes:
        if replay.refused is not None:
            refused[replay.refused].append(replay.name)
    for reason, names in refused.items():
        yield from wrapped(f"{', '.join(names)}: not replayed. {reason}", "  ")


def restarts(result: WhatIf) -> Iterator[str]:
    """Return what is known about a restart with each setting."""
    if result.restarts:
        yield "After a restart (estimates):"
        rows = [(_marked(result, each.name), _peak(each)) for each in result.restarts]
        yield from aligned([("  settings", "peak reserved"), *rows])


def _peak(restart: Restart) -> str:
    if restart.peak_reserved is not None:
        return f"about {format_size(restart.peak_reserved)}"
    return DIRECTIONS[restart.direction or "same"]


def recommendation(result: WhatIf) -> Iterator[str]:
    """Return what to do, the command for it, and the numbers that support it."""
    yield from wrapped(result.verdict.sentence)
    if result.verdict.line:
        yield f"    {result.verdict.line}"
    for reason in result.verdict.reasons:
        yield from wrapped(reason, "  - ")


def _headline(result: WhatIf) -> str:
    gpu = "memory of the GPU unknown (pass --gpu-model to see retries and OOMs)"
    if result.gpu_bytes is not None:
        source = "" if result.gpu_source is None else GPU_SOURCES[result.gpu_source]
        gpu = f"{format_size(result.gpu_bytes)} for PyTorch{source}"
    return f"{sanitize_text(result.name)}, cuda:{result.device}: {result.events:,} events, {gpu}"


def _percent(share: float) -> str:
    """Return a percentage that is 100% only if `share` is exactly 1."""
    return "100%" if share == 1 else f"{min(share, 0.9999):.2%}"


def _row(result: WhatIf, replay: ReplayResult, largest: int) -> tuple[str, ...]:
    """Return the cells of one setting; sizes have the unit of the largest one in the table."""
    is_known = result.gpu_bytes is not None or replay.ooms or replay.retries
    return (
        _marked(result, replay.name),
        format_size(replay.peak_reserved, largest),
        format_size(replay.peak_allocated, largest),
        format_size(replay.worst_stranded, largest),
        f"{replay.retries:,}" if is_known else "?",
        _oom(result, replay) if is_known else "?",
        f"{replay.device_allocs:,}",
    )


def _marked(result: WhatIf, name: str) -> str:
    return ("* " if name == result.verdict.recommended else "  ") + name


def _oom(result: WhatIf, replay: ReplayResult) -> str:
    if replay.oom is None:
        return "no"
    share = replay.oom.event / result.events if result.events else 1.0
    return f"at {share:.0%}"


def _caveats(result: WhatIf) -> Iterator[str]:
    if result.caveats:
        yield "Limitations"
    for caveat in result.caveats[:MAX_CAVEATS]:
        yield from wrapped(caveat, "  - ")
    if len(result.caveats) > MAX_CAVEATS:
        yield f"  ({len(result.caveats) - MAX_CAVEATS} more with --json)"
