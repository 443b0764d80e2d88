"""A what-if answer as plain text for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from torchmem.core.sizes import format_size
from torchmem.core.untrusted import harmless
from torchmem.simulator.whatif.result import Fidelity, Outcome, WhatIf

WIDTH = 98
HEADINGS = (
    ("", "peak", "peak", "stranded", "", "", "device"),
    ("  settings", "reserved", "allocated", "at worst", "retries", "OOM", "allocs"),
)
MOST_CAVEATS = 3
_MARK = "* "


def page(result: WhatIf) -> str:
    """Everything about one device of one snapshot."""
    sections = [
        _wrapped(_headline(result)),
        _wrapped(trust(result.fidelity)),
        [] if result.verdict.decision == "none" else list(_table(result)),
        list(_verdict(result)),
        list(_caveats(result)),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(result: WhatIf) -> str:
    card = "size of the card unknown (tell it with --card to see retries and OOMs)"
    if result.card_bytes is not None:
        card = f"{format_size(result.card_bytes)} for PyTorch{_source(result)}"
    return f"{harmless(result.name)}, GPU {result.device}: {result.events:,} events, {card}"


def _source(result: WhatIf) -> str:
    return {"oom": " (from the OOM in the trace)", "given": " (--card, less the CUDA context)", None: ""}[
        result.card_source
    ]


def trust(fidelity: Fidelity) -> str:
    """How far the replay can be trusted, in words."""
    landed = f"{fidelity.landed:,} of {fidelity.allocations:,} allocations"
    recorded, replayed = format_size(fidelity.recorded_peak_reserved), format_size(fidelity.replayed_peak_reserved)
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


def _table(result: WhatIf) -> Iterator[str]:
    replayed = [outcome for outcome in result.outcomes if outcome.refused is None]
    rows = [*HEADINGS, *(_row(result, outcome) for outcome in replayed)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *cells])
    for outcome in result.outcomes:
        if outcome.refused is not None:
            yield from _wrapped(f"{outcome.name}: not replayed. {outcome.refused}", "  ")


def _row(result: WhatIf, outcome: Outcome) -> tuple[str, ...]:
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


def _oom(result: WhatIf, outcome: Outcome) -> str:
    if outcome.oom is None:
        return "no"
    share = outcome.oom.event / result.events if result.events else 1.0
    return f"at {share:.0%}"


def _verdict(result: WhatIf) -> Iterator[str]:
    verdict = result.verdict
    yield from _wrapped(verdict.sentence)
    if verdict.line:
        yield f"    {verdict.line}"
    for reason in verdict.reasons:
        yield from _wrapped(reason, "  - ")


def _caveats(result: WhatIf) -> Iterator[str]:
    """The gravest; those that hold for every replay come last."""
    if result.caveats:
        yield "Bear in mind"
    for caveat in result.caveats[:MOST_CAVEATS]:
        yield from _wrapped(caveat, "  - ")
    if len(result.caveats) > MOST_CAVEATS:
        yield f"  ({len(result.caveats) - MOST_CAVEATS} more with --json)"


def _wrapped(text: str, first: str = "") -> list[str]:
    indent = " " * len(first)
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
