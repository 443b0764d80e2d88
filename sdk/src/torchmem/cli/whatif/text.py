"""A what-if answer as plain text for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.cli.layout import aligned, wrapped
from torchmem.core.sizes import format_size
from torchmem.core.untrusted import harmless
from torchmem.simulator.whatif.result import Fidelity, Outcome, WhatIf

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


def table(result: WhatIf) -> Iterator[str]:
    """What each setting would have done, the recommended one marked."""
    replayed = [outcome for outcome in result.outcomes if outcome.refused is None]
    yield from aligned([*HEADINGS, *(_row(result, outcome) for outcome in replayed)])
    for outcome in result.outcomes:
        if outcome.refused is not None:
            yield from wrapped(f"{outcome.name}: not replayed. {outcome.refused}", "  ")


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
