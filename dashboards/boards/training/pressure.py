"""How close it is, and what it costs already."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Panel, Query, Text, lines
from dashboards.panels.units import BYTES, COUNT, NUMBER, PER_MINUTE, SECONDS
from dashboards.queries import ranks


def panels() -> list[Panel]:
    """Room, time, retries beside the steps that they slow down, and errors."""
    return [_headroom(), _exhaustion(), _retries(), _steps(), _driver_calls(), _samples(), _ooms()]


def _headroom() -> Panel:
    text = Text(
        "Headroom",
        "How large a tensor would still fit, per rank: at once, and after the allocator has given back its cache? "
        "Where both meet zero, the next allocation fails.",
        "No snapshot yet",
    )
    queries = [
        Query(ranks.headroom(flush=False), f"{common.RANK}, at once"),
        Query(ranks.headroom(flush=True), f"{common.RANK}, after a flush"),
    ]
    return lines(text, queries, BYTES)


def _exhaustion() -> Panel:
    text = Text(
        "Headroom used up in",
        "When will each rank run out, at the trend of its last 15 minutes? A line that falls second by second means "
        "it; one that jumps is noise. No line: that rank's headroom does not fall.",
        "Headroom does not fall",
    )
    return lines(text, [Query(ranks.exhaustion(), common.RANK)], SECONDS)


def _retries() -> Panel:
    text = Text(
        "Allocator retries",
        "How often per minute does each rank flush its whole cache? It slows every step down and often comes before an "
        "OutOfMemoryError.",
    )
    return lines(text, [Query(ranks.retries_per_minute(), common.RANK)], PER_MINUTE)


def _steps() -> Panel:
    text = Text(
        "Step duration",
        "Do the steps slow down? Time between the ends of two optimizer steps: mean of each rank, and what one step in "
        "twenty exceeds over the whole run. It rises together with retries.",
        "No optimizer step seen",
    )
    queries = [
        Query(ranks.mean_step_seconds(), common.RANK),
        Query(ranks.slow_step_seconds(), "{{run}} slowest 5 %", "text"),
    ]
    return lines(text, queries, SECONDS)


def _ooms() -> Panel:
    text = Text(
        "OutOfMemoryErrors",
        "Which ranks ran out of memory, and why? Since the process started, by cause. capacity: the job is too large. "
        "fragmentation: enough was free, but in pieces. limit: the memory fraction. external: other programs.",
        "No OutOfMemoryError",
    )
    return lines(text, [Query(ranks.ooms(), f"{common.RANK}: {{{{cause}}}}")], COUNT).span(24)


def _driver_calls() -> Panel:
    text = Text(
        "Segments taken from the driver",
        "Does the allocator still ask the driver for memory? After the first steps it should not: each call is slow, "
        "and steady ones mean that sizes vary or that something empties the cache.",
    )
    return lines(text, [Query(ranks.driver_calls_per_minute(), common.RANK)], PER_MINUTE)


def _samples() -> Panel:
    text = Text(
        "Samples per second",
        "How fast does the run train, and did it slow down? As the script reports them with session.step(samples=...).",
        "The script reports no samples",
    )
    return lines(text, [Query(ranks.samples_per_second(), "{{run}}")], NUMBER)
