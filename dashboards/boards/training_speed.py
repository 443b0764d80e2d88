"""The row of the dashboard "Training memory" on what memory costs in time."""

from __future__ import annotations

from dashboards import colors as levels
from dashboards.panels import Panel, Query, Unit, lines, rank_lines
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
        "Allocator retries",
        of_ranks(RETRIES_PER_MINUTE),
        Unit.PER_MINUTE,
        mark=levels.RETRIES_PER_MINUTE,
    ).description(
        "How often per minute does each rank flush its whole cache? Retries slow down every step "
        "and often come before an OutOfMemoryError. The dashed line is the threshold of the alert."
    ),
    rank_lines("Step duration", of_ranks(f"{_SECONDS} / ({_COUNT} > 0)"), Unit.SECONDS)
    .description(
        "Are steps getting slower, and in which rank? The mean time between the ends of two "
        "optimizer steps. It rises with retries."
    )
    .no_value("No optimizer step yet"),
    lines(
        "Calls to the driver",
        [
            Query(_calls(catalog.DEVICE_ALLOCS), "segments allocated"),
            Query(_calls(catalog.DEVICE_FREES), "segments returned"),
            Query(_calls(catalog.STREAM_SYNCS), "waits for all streams"),
        ],
        Unit.PER_MINUTE,
    ).description(
        "Do the allocators still request memory from the driver, or return it? After the "
        "first steps they should not: each call is slow, and a constant rate means that sizes "
        "vary or that something empties the cache. Before returning memory, they wait for all "
        "streams. The panel adds up all ranks."
    ),
    lines("Slowest steps", Query(_SLOWEST, "slowest 5%"), Unit.SECONDS)
    .description(
        "How long do the slowest 5% of all steps take, over all ranks? If that is far above "
        "the mean, some steps wait for something, such as a flush of the cache."
    )
    .no_value("No optimizer step yet"),
    lines(
        "Samples per second",
        Query(f"sum({rate(select(catalog.SAMPLES))})", "all ranks"),
        Unit.NUMBER,
    )
    .description(
        "How fast does the run train, and did it slow down? The script reports the samples "
        "with session.step(samples=...)."
    )
    .no_value("The script reports no samples"),
    lines(
        "Memory released",
        Query(f"60 * sum by (tier) ({rate(select(catalog.RELEASED))})", "{{tier}}"),
        Unit.BYTES,
    )
    .description(
        "How much do the tiers of the setting release, and torchmem release, return to the driver? "
        "Releasing memory that is soon allocated again is useless. The sum over all ranks."
    )
    .no_value("No rank releases memory"),
]
