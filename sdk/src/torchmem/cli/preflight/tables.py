"""Several runs as a table: a search for the largest value, a sweep over ranks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from torchmem.cli.layout import aligned, wrapped
from torchmem.cli.preflight.figures import format_signed
from torchmem.cli.preflight.find_batch import Found, Try
from torchmem.cli.preflight.notes import ALWAYS
from torchmem.cli.preflight.sweep import Place, Sweep
from torchmem.cli.preflight.verdict import phantom, tightest
from torchmem.core.sizes import format_size
from torchmem.core.untrusted import harmless
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Plan

COLUMNS = ("peak allocated", "peak reserved", "to spare", "retries", "seconds", "")


def found(result: Found) -> str:
    """The page of a search."""
    rows = [("  " + result.search.option, *COLUMNS), *(_try(one, result) for one in result.tries)]
    bounds = f"{result.search.low:,} to {result.search.high:,}"
    return _page(f"the largest {result.search.option} from {bounds}", result.plan, rows, sentence(result))


def sentence(result: Found) -> str:
    """What the search found."""
    option, best, search = harmless(result.search.option), result.best, result.search
    if best is None:
        return f"None fits: {option} {search.low:,} already runs out of memory."
    device = tightest(best.outcome)
    spare = f"with {format_size(device.headroom)} to spare ({device.headroom / device.total:.0%})"
    retries = f" and {device.retries:,} retr{'ies' if device.retries != 1 else 'y'}" if device.retries else ""
    limit = f"{best.value + 1:,} does not fit" if best.value < search.high else "larger ones were not asked for"
    unit = result.bytes_per_unit
    more = f" Each one more takes about {format_size(unit)}." if unit and unit > 0 else ""
    return f"The largest that fits is {option} {best.value:,}, {spare}{retries}; {limit}.{_calm(result)}{more}"


def _calm(result: Found) -> str:
    """The largest value that was run without a retry, where the best had some."""
    calm = [one.value for one in result.tries if one.fits and not tightest(one.outcome).retries]
    if not calm or (result.best and calm[-1] == result.best.value):
        return ""
    return f" Of those tried, {calm[-1]:,} is the largest without a retry."


def swept(result: Sweep) -> str:
    """The page of a sweep."""
    rows = [("  rank", "of", *COLUMNS), *(_place(place) for place in result.places)]
    return _page("one rank after the other", result.plan, rows, verdict(result))


def verdict(result: Sweep) -> str:
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
    command = harmless(shlex.join(plan.command))
    steps = f"Each run is stopped after {plan.steps:,} optimizer steps."
    heading = f"Preflight on a {phantom(plan.card)} ({format_size(plan.card.memory_bytes)}), {what}: {command}"
    sections = [[*wrapped(heading), *wrapped(steps)], list(aligned(rows)), wrapped(said), wrapped(ALWAYS)]
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
