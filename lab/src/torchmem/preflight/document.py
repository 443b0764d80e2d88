"""The JSON documents of `torchmem preflight`, described in docs/preflight-reference.md."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from torchmem.compare.peak_memory import peak_values
from torchmem.preflight.baseline import BaselineResult
from torchmem.preflight.comparison import GpuModelRow, PreflightComparison
from torchmem.preflight.growth import kept_per_step, needed_per_step
from torchmem.preflight.judged_run import JudgedRun
from torchmem.preflight.pages import search_sentence
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.report import PHANTOM_NOTE, PreflightReport, estimates, growth_on, notes
from torchmem.preflight.result import GpuMemory, RunResult, StepMemory
from torchmem.preflight.search import SearchResult, SearchRun
from torchmem.whatif.result import whatif_values

SCHEMA = 1
STEP_COLUMNS = [column.name for column in fields(StepMemory)]


def run_document(report: PreflightReport, against: BaselineResult | None = None) -> str:
    """Return the document of one run."""
    values = {
        "verdict": asdict(report.verdict),
        "outcome": result_values(report.result),
        "oom": asdict(report.oom) if report.oom else None,
        "need": result_values(report.larger_run) if report.larger_run else None,
        "comparison": _comparison(report, report.comparison) if report.comparison else None,
        "no_comparison": report.no_comparison,
        "runs": report.runs,
        "seconds": report.seconds,
        "estimates": list(estimates(report.result)),
        "notes": list(notes(report)),
        **_against(against),
    }
    return dump_document("run", report.plan, values)


def search_document(result: SearchResult) -> str:
    """Return the document of a search for the largest value."""
    search, best = result.search, result.best
    values = {
        "verdict": {"fits": result.fits, "sentence": search_sentence(result)},
        "option": search.option,
        "low": search.low,
        "high": search.high,
        "best": best.value if best else None,
        "best_steps": best.result.steps if best else None,
        "bytes_per_unit": result.bytes_per_unit,
        "tries": [_search_run(run) for run in result.runs],
        "notes": [PHANTOM_NOTE],
    }
    return dump_document("find_batch", result.plan, values)


def _against(against: BaselineResult | None) -> dict[str, Any]:
    return {"baseline": against.values()} if against else {}


def dump_document(kind: str, plan: RunPlan, values: dict[str, Any]) -> str:
    """Return one line of JSON. `phantom` is always true and marks the figures as not measured."""
    head = {
        "schema": SCHEMA,
        "phantom": True,
        "kind": kind,
        "command": list(plan.command),
        "gpu_model": asdict(plan.gpu),
        "gpus": plan.devices,
        "steps": plan.steps,
        "alloc_conf": plan.alloc_conf,
        "placement": asdict(plan.placement) if plan.placement else None,
    }
    return json.dumps(head | values, ensure_ascii=True) + "\n"


def result_values(result: RunResult) -> dict[str, Any]:
    """Return all fields but the files, which no longer exist when the document is read."""
    values = asdict(result)
    del values["snapshot"], values["oom_report"]
    return values | {"devices": [_device(device) for device in result.devices]}


def _device(device: GpuMemory) -> dict[str, Any]:
    steps = {name: [getattr(step, name) for step in device.steps] for name in STEP_COLUMNS}
    known = asdict(device)
    del known["uses"]
    uses = peak_values(device.memory).get("uses")
    return (
        known
        | ({"uses": uses} if uses else {})
        | {
            "headroom": device.headroom,
            "growth_per_step": kept_per_step(device.steps),
            "peak_growth_per_step": needed_per_step(device.steps),
            "phase_peaks": dict(device.phase_peaks),
            "steps": steps,
        }
    )


def _comparison(report: PreflightReport, comparison: PreflightComparison) -> dict[str, Any]:
    return {
        "settings": whatif_values(comparison.settings),
        "gpu_models": [_gpu(report, row) for row in comparison.gpus],
    }


def _gpu(report: PreflightReport, row: GpuModelRow) -> dict[str, Any]:
    result, grows = row.result, growth_on(report, row)
    if result.refused is not None:
        return {"gpu_model": asdict(row.gpu), "refused": result.refused}
    return {
        "gpu_model": asdict(row.gpu),
        "fits": result.oom is None and grows is None,
        "steps_left": grows.steps_left if grows and result.oom is None else None,
        "peak_reserved": result.peak_reserved,
        "peak_allocated": result.peak_allocated,
        "headroom": row.headroom,
        "retries": result.retries,
    }


def _search_run(run: SearchRun) -> dict[str, Any]:
    return {
        "value": run.value,
        "steps": run.steps,
        "fits": run.fits,
        "outcome": result_values(run.result),
    }


def judged_values(run: JudgedRun) -> dict[str, Any]:
    """Return a run of several, with whether it fits or why there is no verdict."""
    return {
        "fits": run.fits,
        "error": str(run.error) if run.error else None,
        "outcome": result_values(run.result),
    }
