"""Reads what the script's processes left in the scratch folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmem.preflight.orders import OOM_SUFFIX, PROGRESS_FILE, REPORT_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.preflight.outcome import DeviceMemory, Ended, Outcome, StepMemory

LACKING_FILE = Path("cards", "lacking")
NOT_SUPPORTED = re.compile("not.?supported", re.IGNORECASE)
"""In the words that PyTorch has for the error codes of every CUDA library."""


def read_outcome(folder: Path, exit_code: int, seconds: float) -> Outcome:
    """The outcome of the process that stepped most, and among those of the one that reserved most."""
    lacking = _lacking(folder / LACKING_FILE)
    found = [(path, _outcome(json.loads(path.read_text()), exit_code, seconds)) for path in _reports(folder)]
    if not found:
        ended: Ended = "unsupported" if lacking and exit_code else "error" if exit_code else "finished"
        return Outcome(ended, exit_code, _steps(folder / PROGRESS_FILE), seconds, 0, lacking=lacking)
    path, outcome = max(found, key=lambda pair: (pair[1].steps, _reserved(pair[1])))
    name = path.name.removesuffix(REPORT_SUFFIX)
    unsupported = outcome.ended == "error" and lacking and NOT_SUPPORTED.search(outcome.error_message or "")
    return replace(
        outcome,
        ended="unsupported" if unsupported else outcome.ended,
        lacking=lacking,
        snapshot=_existing(path.with_name(name + SNAPSHOT_SUFFIX)),
        oom_report=_existing(path.with_name(name + OOM_SUFFIX)),
    )


def _steps(path: Path) -> int:
    """How far a script got that was killed before it could say more."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((int(line.split()[0]) for line in lines), default=0)


def _reports(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{REPORT_SUFFIX}"))


def _outcome(report: Mapping[str, Any], exit_code: int, seconds: float) -> Outcome:
    return Outcome(
        ended=_ended(report, exit_code),
        exit_code=exit_code,
        steps=report["steps"],
        seconds=seconds,
        host_bytes=report["host_bytes"],
        devices=tuple(_device(fields) for fields in report["devices"]),
        error_message=report["message"],
        values_read=report["values_read"],
    )


def _ended(report: Mapping[str, Any], exit_code: int) -> Ended:
    if report["stopped"]:
        return "steps"
    if exit_code == 0:
        return "finished"
    return "oom" if report["out_of_memory"] else "error"


def _device(fields: Mapping[str, Any]) -> DeviceMemory:
    steps = tuple(StepMemory(**step) for step in fields["steps"])
    phases = tuple((phase, peak) for phase, peak in fields["phase_peaks"])
    return DeviceMemory(**{**fields, "steps": steps, "phase_peaks": phases})


def _lacking(path: Path) -> tuple[str, ...]:
    """Names in the order of their first call."""
    return tuple(dict.fromkeys(path.read_text().split())) if path.exists() else ()


def _reserved(outcome: Outcome) -> int:
    return max((device.peak_reserved for device in outcome.devices), default=0)


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None
