"""The report of one run as plain text for a terminal of 100 columns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from torchmem.cli.layout import aligned, wrapped
from torchmem.cli.oom.text import explanation
from torchmem.cli.preflight.comparison import Comparison
from torchmem.cli.preflight.figures import figures, format_signed
from torchmem.cli.preflight.notes import notes
from torchmem.cli.preflight.single import Report
from torchmem.cli.preflight.verdict import phantom
from torchmem.cli.whatif import text as whatif
from torchmem.core.explanation import format_seconds
from torchmem.core.sizes import format_size
from torchmem.core.untrusted import harmless
from torchmem.preflight.plan import Plan


def page(report: Report) -> str:
    """Everything about one run."""
    sections = [
        [*wrapped(title(report.plan)), *wrapped(_ran(report))],
        wrapped(report.verdict.sentence),
        list(aligned(figures(report.outcome))) if report.outcome.devices else [],
        *(explanation(report.oom) if report.oom else ()),
        *_comparison(report),
        ["Bear in mind", *(line for note in notes(report) for line in wrapped(note, "  - "))],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def title(plan: Plan) -> str:
    """What was tried on what."""
    command = harmless(shlex.join(plan.command))
    number = f"{plan.devices} times " if plan.devices > 1 else ""
    place = plan.placement
    rank = f", as rank {place.rank} of {place.world_size:,}" if place else ""
    size = f" ({format_size(plan.card.memory_bytes)})"
    return f"Preflight on {number}a {phantom(plan.card)}{size}{rank}: {command}"


def _ran(report: Report) -> str:
    outcome = report.outcome
    steps = f"{outcome.steps:,} optimizer step{'s' * (outcome.steps != 1)}"
    how = {"steps": "Stopped", "oom": "Out of memory"}.get(outcome.ended, "Ended by itself")
    host = f"{format_seconds(outcome.seconds)} and {format_size(outcome.host_bytes)} of RAM"
    return f"{how} after {steps}; it took {host} on this machine."


def _comparison(report: Report) -> Iterator[list[str]]:
    found = report.comparison
    if found is None:
        yield wrapped(f"Other settings and cards cannot be compared: {report.no_comparison}")
        return
    gpu = f" of GPU {found.settings.device}" if len(report.outcome.devices) > 1 else ""
    yield [*wrapped(f"Other settings on this card{gpu}, {_how(found, report)}"), "", *whatif.table(found.settings)]
    yield list(whatif.verdict(found.settings))
    yield [f"Other cards{gpu}, {_again(found)} under the settings of this run", "", *aligned(_cards(report, found))]


def _how(found: Comparison, report: Report) -> str:
    fidelity = found.settings.fidelity
    if found.method == "rerun":
        return (
            f"each run again on the phantom, because the replay of the trace is not exact (only {fidelity.landed:,} of "
            f"{fidelity.allocations:,} allocations get the recorded address)"
        )
    where = " of a run on a larger phantom" if report.need else ""
    return f"replayed from the trace{where} ({fidelity.landed:,} of {fidelity.allocations:,} allocations land: exact)"


def _again(found: Comparison) -> str:
    return "each run again" if found.method == "rerun" else "replayed from the same trace"


def _cards(report: Report, found: Comparison) -> list[list[str]]:
    rows = [["", "", "peak", "", "", ""], ["  card", "memory", "reserved", "to spare", "retries", ""]]
    for row in found.cards:
        mark = "> " if row.card.name == report.plan.card.name else "  "
        name, memory, outcome = mark + row.card.name, format_size(row.card.memory_bytes), row.outcome
        if outcome.refused:
            rows.append([name, memory, "", "", "", "unknown"])
        elif outcome.oom:
            rows.append([name, memory, "", "", "", "does not fit"])
        else:
            numbers = format_size(outcome.peak_reserved), format_signed(row.headroom), f"{outcome.retries:,}"
            rows.append([name, memory, *numbers, "fits"])
    return rows
