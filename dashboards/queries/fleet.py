"""All nodes and runs at once: the queries of "Fleet"."""

from __future__ import annotations

from dashboards.queries import recorded
from dashboards.queries.select import DEVICE_ROW, GPU_ROW, RUN_ROW, among, row, select

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec

# Rows of the table of ranks: the ones with the least headroom, and all whose headroom falls.
TIGHTEST = 20


def nodes_down() -> str:
    """Exporters that do not answer."""
    return f'count({recorded.UP.name}{{job="torchmem", instance=~"$node"}} == 0) or vector(0)'


def gpus() -> str:
    """GPUs that answer."""
    return f"sum({select(recorded.NODE_GPUS)})"


def gpus_lost() -> str:
    """GPUs that stopped answering."""
    return f"sum({select(recorded.NODE_GPUS_LOST)})"


def gpus_wasted() -> str:
    """Memory that nobody can use, in GPUs."""
    return f"sum({select(recorded.NODE_WASTED)})"


def gpus_idle_held() -> str:
    """GPUs whose memory is held while nothing runs."""
    return f"sum({select(recorded.NODE_IDLE_HELD)})"


def wasted_by_node() -> str:
    """Memory that nobody can use, in GPUs, per node."""
    return select(recorded.NODE_WASTED)


def part(name: str) -> str:
    """One part of the memory of all chosen nodes."""
    return f"sum({select(recorded.NODE_PART, part=name)})"


def total() -> str:
    """Memory of all chosen nodes."""
    return f"sum({select(recorded.NODE_TOTAL)})"


def _tightest() -> str:
    falling = row(DEVICE_ROW, select(recorded.EXHAUSTION))
    return f"(bottomk({TIGHTEST}, {_headroom_share()}) or {falling})"


def _headroom_share() -> str:
    return row(DEVICE_ROW, f"{select(recorded.LEAST_HEADROOM)} / {select(catalog.DEVICE_TOTAL)}")


def tight_headroom() -> str:
    """Least headroom within 5 minutes, of the tightest ranks."""
    return among(DEVICE_ROW, row(DEVICE_ROW, select(recorded.LEAST_HEADROOM)), _tightest())


def tight_headroom_share() -> str:
    """The same as a share of the device."""
    return among(DEVICE_ROW, _headroom_share(), _tightest())


def tight_exhaustion() -> str:
    """Seconds until the headroom is used up, of the ranks whose headroom falls."""
    return row(DEVICE_ROW, select(recorded.EXHAUSTION))


def tight_stranded() -> str:
    """Stranded share of the device, of the tightest ranks."""
    return among(DEVICE_ROW, row(DEVICE_ROW, select(recorded.STRANDED_RATIO)), _tightest())


def tight_retries() -> str:
    """Allocator retries within 10 minutes, of the tightest ranks."""
    return among(DEVICE_ROW, row(DEVICE_ROW, select(recorded.RETRIES_10M)), _tightest())


def wasteful_share() -> str:
    """Share of each GPU that nobody can use, where there is any."""
    return f"{row(GPU_ROW, select(recorded.WASTED))} > 0"


def wasteful(spec: MetricSpec) -> str:
    """Another value of the GPUs of which a share is wasted."""
    return among(GPU_ROW, row(GPU_ROW, select(spec)), f"({wasteful_share()})")


def run_value(spec: MetricSpec) -> str:
    """One value per run."""
    return row(RUN_ROW, select(spec))


def run_ranks(states: str) -> str:
    """Processes of each run that are in one of the states, written with | between them."""
    selector = select(recorded.RUN_RANKS).replace("}", f', state=~"{states}"}}')
    return f"sum by (run) ({selector})"


def run_retries() -> str:
    """Allocator retries per minute of each run."""
    return f"60 * {row(RUN_ROW, select(recorded.RUN_RETRIES))}"


def run_ooms() -> str:
    """OutOfMemoryErrors of each run within an hour."""
    return f"sum by (run) ({select(recorded.RUN_OOMS)})"


def ooms_by_cause(cause: str) -> str:
    """OutOfMemoryErrors of one cause within the last hour."""
    return f"sum({select(recorded.RUN_OOMS, cause=cause)})"


ALERT_ROW = ("severity", "alertname", "run", "rank", "instance", "gpu")


def alerts() -> str:
    """Alerts that fire now."""
    return row(ALERT_ROW, _ours(select(recorded.ALERTS, alertstate="firing")))


def alerts_since() -> str:
    """Since when each of them is active, in milliseconds since 1970."""
    return among(
        ALERT_ROW, row(ALERT_ROW, f"1000 * {_ours(select(recorded.ALERTS_SINCE))}"), alerts()
    )


def alerts_firing() -> str:
    """Number of alerts that fire now."""
    return f"count({alerts()}) or vector(0)"


def _ours(selector: str) -> str:
    return selector.replace("{", '{alertname=~"Torchmem.*", ', 1)
