"""A preflight as JSON; its shape is described in docs/preflight.md."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from torchmem.preflight.comparison import CardRow
from torchmem.preflight.outcome import DeviceMemory, Outcome, StepMemory
from torchmem.preflight.plan import Plan
from torchmem.preflight.report import ALWAYS, Report, notes
from torchmem.preflight.search import Found, Place, Sweep
from torchmem.preflight.text import search_sentence, sweep_sentence
from torchmem.preflight.verdict import growth
from torchmem.whatif.answer import whatif_values

SCHEMA = 1
STEP_COLUMNS = [column.name for column in fields(StepMemory)]


def run_document(report: Report) -> str:
    """One run."""
    search_document = report.comparison
    comparison = None
    if search_document is not None:
        settings, cards = (
            whatif_values(search_document.settings),
            [_card(row) for row in search_document.cards],
        )
        comparison = {"method": search_document.method, "settings": settings, "cards": cards}
    values = {
        "verdict": asdict(report.verdict),
        "outcome": _outcome(report.outcome),
        "oom": asdict(report.oom) if report.oom else None,
        "need": _outcome(report.need) if report.need else None,
        "comparison": comparison,
        "no_comparison": report.no_comparison,
        "notes": list(notes(report)),
    }
    return _dumped("run", report.plan, values)


def search_document(result: Found) -> str:
    """A search for the largest value."""
    search, best = result.search, result.best
    tries = [
        {"value": one.value, "fits": one.fits, "outcome": _outcome(one.outcome)}
        for one in result.tries
    ]
    values = {
        "verdict": {"fits": best is not None, "sentence": search_sentence(result)},
        "option": search.option,
        "low": search.low,
        "high": search.high,
        "best": best.value if best else None,
        "bytes_per_unit": result.bytes_per_unit,
        "tries": tries,
        "notes": [ALWAYS],
    }
    return _dumped("find_batch", result.plan, values)


def sweep_document(result: Sweep) -> str:
    """A sweep over ranks or world sizes."""
    fits = None if any(place.fits is None for place in result.places) else True
    values = {
        "verdict": {
            "fits": False if any(place.fits is False for place in result.places) else fits,
            "sentence": sweep_sentence(result),
        },
        "places": [_place(place) for place in result.places],
        "notes": [ALWAYS],
    }
    return _dumped("sweep", result.plan, values)


def _dumped(kind: str, plan: Plan, values: dict[str, Any]) -> str:
    """One line. `phantom` is always true: nobody shall take these figures for measured ones."""
    head = {
        "schema": SCHEMA,
        "phantom": True,
        "kind": kind,
        "command": list(plan.command),
        "card": asdict(plan.card),
        "gpus": plan.devices,
        "steps": plan.steps,
        "alloc_conf": plan.alloc_conf,
        "placement": asdict(plan.placement) if plan.placement else None,
    }
    return json.dumps(head | values, ensure_ascii=True) + "\n"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    """All but the files, which are gone when this is read."""
    values = asdict(outcome)
    del values["snapshot"], values["oom_report"]
    return values | {"devices": [_device(device) for device in outcome.devices]}


def _device(device: DeviceMemory) -> dict[str, Any]:
    steps = {name: [getattr(step, name) for step in device.steps] for name in STEP_COLUMNS}
    return asdict(device) | {
        "headroom": device.headroom,
        "growth_per_step": growth(device.steps),
        "phase_peaks": dict(device.phase_peaks),
        "steps": steps,
    }


def _card(row: CardRow) -> dict[str, Any]:
    outcome = row.outcome
    if outcome.refused is not None:
        return {"card": asdict(row.card), "refused": outcome.refused}
    return {
        "card": asdict(row.card),
        "fits": outcome.oom is None,
        "peak_reserved": outcome.peak_reserved,
        "peak_allocated": outcome.peak_allocated,
        "headroom": row.headroom,
        "retries": outcome.retries,
    }


def _place(place: Place) -> dict[str, Any]:
    error = str(place.error) if place.error else None
    return asdict(place.placement) | {
        "fits": place.fits,
        "error": error,
        "outcome": _outcome(place.outcome),
    }
