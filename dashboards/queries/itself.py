"""What watching costs and whether it works: the queries of "torchmem itself"."""

from __future__ import annotations

from dashboards.queries import recorded
from dashboards.queries.select import live, rate, select

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec


def exporters_down() -> str:
    """Number of exporters that do not answer."""
    return f"count({_scraped(recorded.UP)} == 0) or vector(0)"


def versions() -> str:
    """Versions of the exporters, as labels."""
    return f"count by (version) ({select(catalog.BUILD_INFO)})"


def nvml_down() -> str:
    """Nodes without a driver that answers, with the reason."""
    return f"count by (reason) ({select(catalog.NVML_UP)} == 0)"


def scrape_seconds() -> str:
    """How long Prometheus waited for each exporter."""
    return _scraped(recorded.SCRAPE_DURATION)


def scrape_samples() -> str:
    """Samples that each exporter gave."""
    return _scraped(recorded.SCRAPE_SAMPLES)


def _scraped(spec: MetricSpec) -> str:
    return select(spec).replace("{", '{job="torchmem", ', 1)


def collectors() -> str:
    """1 for each collector that succeeded."""
    return select(catalog.COLLECTOR_SUCCESS)


def collectors_failed() -> str:
    """Collectors that failed in the newest scrape."""
    return f"count({select(catalog.COLLECTOR_SUCCESS)} == 0) or vector(0)"


def collector_seconds() -> str:
    """Duration of each collector."""
    return select(catalog.COLLECTOR_DURATION)


def rejected() -> str:
    """Files of the run directory that were refused, per minute and reason."""
    return f"60 * sum by (instance, reason) ({rate(select(catalog.REJECTED_SAMPLES))}) > 0"


def rejected_in_range() -> str:
    """Files that were refused within the dashboard's time range."""
    return f"sum(round(increase({select(catalog.REJECTED_SAMPLES, over='$__range')}))) or vector(0)"


def sdk_share() -> str:
    """CPU time of the SDK, as a share of one core, per rank."""
    return live(rate(select(catalog.SDK_CPU)))


def dearest_sdk() -> str:
    """The rank in which the SDK takes most CPU time."""
    return f"topk(1, {live(rate(select(catalog.SDK_CPU)))})"


def read_seconds(kind: str) -> str:
    """Duration of the newest read, per rank."""
    return live(select(catalog.SAMPLE_DURATION, kind=kind))


def sample_age() -> str:
    """Seconds since each rank wrote its state."""
    return live(f"time() - {select(catalog.SAMPLE_TIMESTAMP)}")


def snapshot_age() -> str:
    """Seconds since the newest snapshot of each rank."""
    return live(f"time() - {select(catalog.SNAPSHOT_TIMESTAMP)}")


def sdk_errors() -> str:
    """Errors that the SDK swallowed since the process started, by stage, where there were any."""
    return f"sum by (run, rank, stage) ({select(catalog.SDK_ERRORS)}) > 0"


def sdk_errors_in_range() -> str:
    """Errors that the SDK swallowed within the dashboard's time range."""
    return f"sum(round(increase({select(catalog.SDK_ERRORS, over='$__range')}))) or vector(0)"


def ranks() -> str:
    """Ranks whose samples are read, per node."""
    return f"count by (instance) ({select(catalog.SAMPLE_TIMESTAMP)})"
