"""How good predictions of OOMs are, as measured by `python -m experiments.prediction`."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

MEASURED = files("torchmem.manifests").joinpath("prediction.json")


def measured() -> dict[str, Any]:
    """Return the results of the yardstick; `rules` has the shipped rule first."""
    results: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return results


def worth() -> str:
    """Return in one sentence how often the alert is right, and how often it is in time."""
    shipped = measured()["rules"][0]
    came_true, told = _percent(shipped["came_true"]), _percent(shipped["told"][0])
    return (
        f"In simulated jobs, {came_true} of 100 such warnings came true within an hour, and {told} "
        "of 100 OOMs caused by growth were predicted at least 2 minutes ahead."
    )


def planned_worth() -> str:
    """Return in one sentence how often TorchmemPlannedBatchTooLarge is right, and how early."""
    plan = measured()["plan"]
    return (
        f"Of 100 simulated jobs with such a warning, {_percent(plan['came_true'])} ran out of "
        f"memory, half of them {plan['minutes_ahead']:.0f} minutes later or more."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
