"""The row of the dashboard "Training memory" on what memory costs in time."""

from __future__ import annotations

from dashboards import colors as levels
from dashboards.panels import Panel, Query, Text, Unit, lines, rank_lines
from dashboards.queries import RETRIES_PER_MINUTE, of_ranks, rate, select

from torchmem.metrics import catalog

_SECONDS, _COUNT = (rate(select(catalog.STEP_DURATION, part)) for part in ("_sum", "_count"))
_BUCKETS = rate(select(catalog.STEP_DURATION, "_bucket"))
# The comparison drops NaN, which is the quantile while no step ends.
_SLOWEST = f"histogram_quantile(0.95, sum by (le) ({_BUCKETS})) >= 0"


def _calls(spec: catalog.MetricSpec) -> str:
    return f"60 * sum({rate(select(spec))})"


PANELS: list[Panel] = [
    rank_lines(
        Text(
            "Allocator retries",
            "How often per minute does each rank flush its whole cache? Retries slow down every "
            "step and often come before an OutOfMemoryError. The dashed line is the threshold of "
            "the alert.",
        ),
        of_ranks(RETRIES_PER_MINUTE),
        Unit.PER_MINUTE,
        mark=levels.RETRIES_PER_MINUTE,
    ),
    rank_lines(
        Text(
            "Step duration",
            "Are steps getting slower, and in which rank? The mean time between the ends of two "
            "optimizer steps. It rises with retries.",
            "No optimizer step yet",
        ),
        of_ranks(f"{_SECONDS} / ({_COUNT} > 0)"),
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Calls to the driver",
            "Do the allocators still request memory from the driver, or return it? After the "
            "first steps they should not: each call is slow, and a constant rate means that sizes "
            "vary or that something empties the cache. Before returning memory, they wait for all "
            "streams. The panel adds up all ranks.",
        ),
        [
            Query(_calls(catalog.DEVICE_ALLOCS), "segments allocated"),
            Query(_calls(catalog.DEVICE_FREES), "segments returned"),
            Query(_calls(catalog.STREAM_SYNCS), "waits for all streams"),
        ],
        Unit.PER_MINUTE,
    ),
    lines(
        Text(
            "Slowest steps",
            "How long do the slowest 5% of all steps take, over all ranks? If that is far above "
            "the mean, some steps wait for something, such as a flush of the cache.",
            "No optimizer step yet",
        ),
        [Query(_SLOWEST, "slowest 5%")],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Samples per second",
            "How fast does the run train, and did it slow down? The script reports the samples "
            "with session.step(samples=...).",
            "The script reports no samples",
        ),
        [Query(f"sum({rate(select(catalog.SAMPLES))})", "all ranks")],
        Unit.NUMBER,
    ),
    lines(
        Text(
            "Memory released",
            "How much do the tiers of the setting release, and torchmem release, return to the "
            "driver? Releasing memory that is soon allocated again is useless. The sum over "
            "all ranks.",
            "No rank releases memory",
        ),
        [Query(f"60 * sum by (tier) ({rate(select(catalog.RELEASED))})", "{{tier}}")],
        Unit.BYTES,
    ),
]
