"""The report of a fleet as CSV: one line per run, user, team and namespace, with all digits."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from torchmem.fleet.report import Amounts, Bill, FleetReport, WholeCost

_OWNER = ("run", "user", "team", "namespace")
_KINDS = {"held": "used", "lost": "lost", "stranded": "stranded", "idle": "idle", "empty": "empty"}


def table(report: FleetReport) -> str:
    """Return the lines; what is idle or stranded without an owner is in one without names.

    Without prices, there are no columns of money.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    costs = [f"{kind}_cost" for kind in _KINDS] + ["currency"] if report.cost else []
    lines.writerow([*_OWNER, *(f"{kind}_gpu_hours" for kind in _KINDS), *costs])
    for bill in _bills(report):
        names = [_plain(getattr(bill, name)) for name in _OWNER]
        money = [*_amounts(bill.cost), report.cost.currency] if report.cost else []
        lines.writerow([*names, *_amounts(bill), *money])
    return text.getvalue()


def _bills(report: FleetReport) -> Iterator[Bill]:
    yield from report.by_run
    idle, stranded = report.idle_unattributed, report.stranded_unattributed
    if idle or stranded:
        yield Bill(0, 0, stranded, idle, 0, cost=_unattributed(report.cost))


def _unattributed(cost: WholeCost | None) -> Amounts | None:
    if cost is None:
        return None
    return Amounts(0, 0, cost.stranded_unattributed, cost.idle_unattributed, 0)


def _amounts(amounts: Amounts | None) -> list[str]:
    """Return the numbers; what has no price has none."""
    if amounts is None:
        return [""] * len(_KINDS)
    return [f"{getattr(amounts, name):.6f}".rstrip("0").rstrip(".") for name in _KINDS.values()]


def _plain(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula: names are chosen by users."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
