"""The figures of a run as rows of a table, a column for each card.

The report of one run as plain text for a terminal of 100 columns.

Several runs as a table: a search for the largest value, a sweep over ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from torchmem.allocator.oom_report import format_seconds
from torchmem.allocator.sizes import format_size
from torchmem.cli.terminal import aligned, wrapped
from torchmem.oom.text import explanation
from torchmem.preflight.comparison import Comparison
from torchmem.preflight.outcome import DeviceMemory, Outcome, Phase
from torchmem.preflight.plan import Plan
from torchmem.preflight.report import ALWAYS, Report, notes
from torchmem.preflight.search import Found, Place, Sweep, Try
from torchmem.preflight.verdict import growth, phantom, tightest
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.answer import table, verdict

PHASES: tuple[Phase, ...] = ("setup", "forward", "backward", "optimizer")


def figures(outcome: Outcome) -> list[list[str]]:
    """Rows; the first names the cards when there are several."""
    devices = outcome.devices
    columns = [_column(device, ran_out=outcome.ended == "oom") for device in devices]
    rows = [
        [f"  {name}", *(column.get(name, "") for column in columns)] for name in _names(columns)
    ]
    return (
        [["", *(f"GPU {device.device}" for device in devices)], *rows] if len(devices) > 1 else rows
    )


def format_signed(size: int) -> str:
    """A size that may be below zero."""
    return format_size(size) if size >= 0 else f"-{format_size(-size)}"


def peak_place(device: DeviceMemory) -> str:
    """When most was allocated."""
    if not device.peak_step:
        return "setup"
    return f"step {device.peak_step:,}, {device.peak_phase}"


def _names(columns: Sequence[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))


def _column(device: DeviceMemory, *, ran_out: bool) -> dict[str, str]:
    phases = dict(device.phase_peaks)
    return {
        "peak allocated": format_size(device.peak_allocated),
        "  reached in": peak_place(device),
        **{f"  most in {phase}": format_size(phases[phase]) for phase in PHASES if phase in phases},
        "peak reserved": format_size(device.peak_reserved),
        "outside PyTorch": format_size(device.outside),
        **({} if ran_out else {"to spare": format_signed(device.headroom)}),
        "stranded after a step": format_size(device.stranded),
        "growth per step": _growth(device),
        "retries": f"{device.retries:,}",
        "device allocs": f"{device.device_allocs:,}",
    }


def _growth(device: DeviceMemory) -> str:
    found = growth(device.steps)
    return "too few steps to tell" if found is None else format_size(found) if found else "none"


def run_page(report: Report) -> str:
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
    command = sanitize_text(shlex.join(plan.command))
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
    yield [
        *wrapped(f"Other settings on this card{gpu}, {_how(found, report)}"),
        "",
        *table(found.settings),
    ]
    yield list(verdict(found.settings))
    yield [
        f"Other cards{gpu}, {_again(found)} under the settings of this run",
        "",
        *aligned(_cards(report, found)),
    ]


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
    rows = [
        ["", "", "peak", "", "", ""],
        ["  card", "memory", "reserved", "to spare", "retries", ""],
    ]
    for row in found.cards:
        mark = "> " if row.card.name == report.plan.card.name else "  "
        name, memory, outcome = (
            mark + row.card.name,
            format_size(row.card.memory_bytes),
            row.outcome,
        )
        if outcome.refused:
            rows.append([name, memory, "", "", "", "unknown"])
        elif outcome.oom:
            rows.append([name, memory, "", "", "", "does not fit"])
        else:
            numbers = (
                format_size(outcome.peak_reserved),
                format_signed(row.headroom),
                f"{outcome.retries:,}",
            )
            rows.append([name, memory, *numbers, "fits"])
    return rows


COLUMNS = ("peak allocated", "peak reserved", "to spare", "retries", "seconds", "")


def search_page(result: Found) -> str:
    """The page of a search."""
    rows = [("  " + result.search.option, *COLUMNS), *(_try(one, result) for one in result.tries)]
    bounds = f"{result.search.low:,} to {result.search.high:,}"
    return _page(
        f"the largest {result.search.option} from {bounds}",
        result.plan,
        rows,
        search_sentence(result),
    )


def search_sentence(result: Found) -> str:
    """What the search found."""
    option, best, search = sanitize_text(result.search.option), result.best, result.search
    if best is None:
        return f"None fits: {option} {search.low:,} already runs out of memory."
    device = tightest(best.outcome)
    spare = f"with {format_size(device.headroom)} to spare ({device.headroom / device.total:.0%})"
    retries = (
        f" and {device.retries:,} retr{'ies' if device.retries != 1 else 'y'}"
        if device.retries
        else ""
    )
    limit = (
        f"{best.value + 1:,} does not fit"
        if best.value < search.high
        else "larger ones were not asked for"
    )
    unit = result.bytes_per_unit
    more = f" Each one more takes about {format_size(unit)}." if unit and unit > 0 else ""
    return f"The largest that fits is {option} {best.value:,}, {spare}{retries}; {limit}.{_calm(result)}{more}"


def _calm(result: Found) -> str:
    """The largest value that was run without a retry, where the best had some."""
    calm = [one.value for one in result.tries if one.fits and not tightest(one.outcome).retries]
    if not calm or (result.best and calm[-1] == result.best.value):
        return ""
    return f" Of those tried, {calm[-1]:,} is the largest without a retry."


def sweep_page(result: Sweep) -> str:
    """The page of a sweep."""
    rows = [("  rank", "of", *COLUMNS), *(_place(place) for place in result.places)]
    return _page("one rank after the other", result.plan, rows, sweep_sentence(result))


def sweep_sentence(result: Sweep) -> str:
    """What the sweep found."""
    number, misses = len(result.places), sum(place.fits is False for place in result.places)
    unknown = sum(place.fits is None for place in result.places)
    if misses:
        return f"{misses:,} of {number:,} do not fit a {phantom(result.plan.card)}."
    if unknown:
        return f"{unknown:,} of {number:,} ended without a verdict; their errors are above."
    full = min(result.places, key=lambda place: tightest(place.outcome).headroom)
    spare = format_size(tightest(full.outcome).headroom)
    rank = f"rank {full.placement.rank:,} of {full.placement.world_size:,}"
    return f"All {number:,} fit a {phantom(result.plan.card)}; the fullest is {rank}, with {spare} to spare."


def _page(what: str, plan: Plan, rows: Sequence[Sequence[str]], said: str) -> str:
    command = sanitize_text(shlex.join(plan.command))
    steps = f"Each run is stopped after {plan.steps:,} optimizer steps."
    heading = f"Preflight on a {phantom(plan.card)} ({format_size(plan.card.memory_bytes)}), {what}: {command}"
    sections = [
        [*wrapped(heading), *wrapped(steps)],
        list(aligned(rows)),
        wrapped(said),
        wrapped(ALWAYS),
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _try(one: Try, result: Found) -> tuple[str, ...]:
    mark = "* " if one is result.best else "  "
    return (f"{mark}{one.value:,}", *_numbers(one.outcome, "fits" if one.fits else "does not fit"))


def _place(place: Place) -> tuple[str, ...]:
    word = {True: "fits", False: "does not fit", None: "no verdict"}[place.fits]
    rank, world = f"  {place.placement.rank:,}", f"{place.placement.world_size:,}"
    return (rank, world, *_numbers(place.outcome, word))


def _numbers(outcome: Outcome, word: str) -> tuple[str, ...]:
    seconds = f"{outcome.seconds:.1f}"
    if not outcome.devices:
        return "", "", "", "", seconds, word
    device = tightest(outcome)
    spare = "" if outcome.ended == "oom" else format_signed(device.headroom)
    sizes = format_size(device.peak_allocated), format_size(device.peak_reserved)
    return (*sizes, spare, f"{device.retries:,}", seconds, word)
