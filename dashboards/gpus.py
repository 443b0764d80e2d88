"""How dashboards show GPUs: their values, their health in words, and a line for each."""

from __future__ import annotations

from dashboards.colors import Levels
from dashboards.panels import Query, lines_in_band, lowest_first
from dashboards.queries import GPU_ROW, append_matcher, named, row, select, worst
from grafana_foundation_sdk.builders import timeseries

from torchmem.metrics.catalog import CATALOG, MetricSpec
from torchmem.metrics.colors import ATTENTION, FAILED, GOOD, NOTICE
from torchmem.sample.xids import XIDS

NO_GPU = "No GPU: NVML is not available"

HEALTH = {
    "healthy": ("Healthy", GOOD),
    "reset_pending": ("Reset when idle", ATTENTION),
    "gpu_reset": ("Reset", FAILED),
    "bus_reset": ("Reset bus", FAILED),
    "drain_p2p": ("Drain P2P", FAILED),
    "drain_and_reset": ("Drain and reset", FAILED),
    "recover_imex_domain": ("Recover IMEX", FAILED),
    "node_reboot": ("Reboot node", FAILED),
    "system_reboot": ("Reboot node", FAILED),
    "remap_failed": ("Replace", FAILED),
    "lost": ("Lost", FAILED),
    "nvml_down": ("NVML is down", ATTENTION),
    "no_gpu": ("No GPU", NOTICE),
}
"""How a GPU is or what to do with it, in words and color; the last two are of a whole node.

The keys are values of the label health of gpu:nvml_health:info.
"""

# The reasons that lower the clocks, from harmless to serious, as numbers for value mappings.
THROTTLING = {
    "0": ("None", GOOD),
    "1": ("Power cap", NOTICE),
    "2": ("Heat", ATTENTION),
    "3": ("Power supply", ATTENTION),
}
_SEVERITY_COLORS = {"application": NOTICE, "warning": ATTENTION, "critical": FAILED}
XID_ROW = (*GPU_ROW, "xid")
XID_COLORS = {str(number): _SEVERITY_COLORS[xid.severity] for number, xid in XIDS.items()}
NO_XID = "None"
NAME = "{{short_name}}"
"""The legend of a GPU: "#3 H100", as queries.named names it."""


def _spec(name: str) -> MetricSpec:
    return CATALOG[f"nvml_{name}"]


def value(name: str, over: str = "", **fixed: str) -> str:
    """Return the metric nvml_`name` of every GPU."""
    return select(_spec(name), over=over, **fixed)


def gpu_value(name: str, *more: str, **fixed: str) -> str:
    """Return a value of every GPU for a table; the labels `more` become columns."""
    return row(GPU_ROW, value(name, **fixed), *more)


def throttling(over: str = "") -> str:
    """Return the most serious reason that lowers the clocks of a GPU, as a key of THROTTLING."""
    thermal = append_matcher(value("throttle_active", over), 'reason=~"(sw|hw)_thermal_slowdown"')
    brake = value("throttle_active", over, reason="hw_power_brake_slowdown")
    cap = value("throttle_active", over, reason="sw_power_cap")
    return row(GPU_ROW, f"3 * {brake} or 2 * {thermal} or {cap}")


def newest_xid() -> str:
    """Return the newest XID of each GPU within the time range as a label, NO_XID without one."""
    newest = (
        f"topk by (instance, uuid) (1, {value('xid_last_timestamp_seconds')} > time() - $__range_s)"
    )
    none = f'label_replace({gpu_value("xid_errors_total")}, "xid", "{NO_XID}", "", "")'
    return row(XID_ROW, f"{newest} or on (instance, uuid) {none}")


def gpu_lines(
    title: str,
    expression: str,
    unit: str,
    *,
    lowest: bool = False,
    mark: Levels | None = None,
) -> timeseries.Panel:
    """Return one line per GPU, or with many GPUs those of the worst ones and a band of all.

    The highest values are the worst ones, or with `lowest` the lowest.
    """
    per_gpu = row(GPU_ROW, expression)
    line = Query(named(worst(per_gpu, GPU_ROW, lowest=lowest)), NAME)
    panel = lines_in_band(title, line, per_gpu, unit, mark).no_value(NO_GPU)
    return lowest_first(panel) if lowest else panel
