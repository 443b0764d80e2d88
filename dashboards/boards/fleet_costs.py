"""The row of the dashboard "Fleet" that shows what the GPU-hours of its report cost."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import LINK_TO_RUN
from dashboards.boards.fleet_report import (
    HELD,
    KINDS,
    KINDS_EXPLAINED,
    OWNER,
    OWNER_ROW,
    by_label,
    hours,
)
from dashboards.panels import Column, Panel, Query, Unit, joined_table, stat_panel
from dashboards.queries import select

from torchmem.metrics.catalog import MetricSpec

TITLE = "What did it cost?"
NO_PRICE = "No price is set"
PRICED = "The exporter's setting gpu_hour_prices has the price of each model, and its currency."
_NEWEST_PRICE = f"last_over_time({select(recorded.MODEL_PRICE, over='$__range')})"


def _cost(spec: MetricSpec) -> str:
    """Return what the GPU-hours of a series cost at the newest price; nothing without one."""
    price = f"max by (job, model) ({_NEWEST_PRICE})"
    return f"{hours(spec)} * on (job, model) group_left () {price}"


def _in_currency(spec: MetricSpec) -> str:
    priced = f"{hours(spec)} * on (job, model) group_left (currency) {_NEWEST_PRICE}"
    return f"sum by (currency) ({priced})"


def _total(title: str, question: str, spec: MetricSpec) -> Panel:
    """Return one number for each currency, with its code; 0 only where there is a price."""
    cost = f"{_in_currency(spec)} or 0 * {_in_currency(recorded.PRICED_GPUS)}"
    panel = stat_panel(title, Query(cost, "{{currency}}"), Unit.COUNT, empty=NO_PRICE)
    return panel.description(f"{question} {PRICED}").decimals(0)


def _table(title: str, question: str, labels: tuple[str, ...], names: list[Column]) -> Panel:
    amounts = [
        Column(heading, by_label(labels, _cost(spec)), unit=Unit.COUNT, decimals=2)
        for heading, spec in KINDS.items()
    ]
    table = joined_table(title, [*names, *amounts], sort="Held", descending=True)
    table.description(f"{question} {HELD}{KINDS_EXPLAINED} {PRICED}").no_value(NO_PRICE)
    return table.height(7).min_width(60)


PANELS: list[Panel] = [
    _total("Cost of all GPUs", "What did all GPUs cost, used or not?", recorded.PRICED_GPUS),
    _total("Cost of ranks", "What did the GPUs of ranks cost?", recorded.RUN_GPUS),
    _total(
        "Cost of restarts",
        "What did GPUs cost while ranks waited for one that ran out of memory, or started again?",
        recorded.RUN_LOST_GPUS,
    ),
    _total(
        "Cost of stranding",
        "What did memory between tensors cost that no request fits into?",
        recorded.RUN_STRANDED_GPUS,
    ),
    _total(
        "Cost of idle GPUs",
        "What did idle GPUs cost while their memory was held?",
        recorded.RUN_IDLE_GPUS,
    ),
    _total(
        "Cost of empty GPUs",
        "What did GPUs cost that Slurm or the kubelet had given away, without a process?",
        recorded.RUN_EMPTY_GPUS,
    ),
    _table(
        "Cost by run",
        "What did the GPU-hours of each run cost?",
        OWNER_ROW,
        [
            Column("Run", label="run", link=LINK_TO_RUN),
            Column("User", label="user"),
            Column("Team", label="team"),
        ],
    ),
    _table(
        "Cost by user, team and namespace",
        "Whose GPU-hours cost how much?",
        OWNER,
        [
            Column("User", label="user"),
            Column("Team", label="team"),
            Column("Namespace", label="namespace"),
        ],
    ),
]
