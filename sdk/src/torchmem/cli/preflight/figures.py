"""The figures of a run as rows of a table, a column for each card."""

from __future__ import annotations

from collections.abc import Sequence

from torchmem.cli.preflight.growth import growth
from torchmem.core.sizes import format_size
from torchmem.preflight.outcome import DeviceMemory, Outcome, Phase

PHASES: tuple[Phase, ...] = ("setup", "forward", "backward", "optimizer")


def figures(outcome: Outcome) -> list[list[str]]:
    """Rows; the first names the cards when there are several."""
    devices = outcome.devices
    columns = [_column(device, ran_out=outcome.ended == "oom") for device in devices]
    rows = [[f"  {name}", *(column.get(name, "") for column in columns)] for name in _names(columns)]
    return [["", *(f"GPU {device.device}" for device in devices)], *rows] if len(devices) > 1 else rows


def format_signed(size: int) -> str:
    """A size that may be below zero."""
    return format_size(size) if size >= 0 else f"-{format_size(-size)}"


def peak_place(device: DeviceMemory) -> str:
    """When most was allocated."""
    if not device.peak_step:
        return "setup"
    return f"step {device.peak_step:,}, {device.peak_phase}"


def _names(columns: Sequence[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))


def _column(device: DeviceMemory, *, ran_out: bool) -> dict[str, str]:
    phases = dict(device.phase_peaks)
    return {
        "peak allocated": format_size(device.peak_allocated),
        "  reached in": peak_place(device),
        **{f"  most in {phase}": format_size(phases[phase]) for phase in PHASES if phase in phases},
        "peak reserved": format_size(device.peak_reserved),
        "outside PyTorch": format_size(device.outside),
        **({} if ran_out else {"to spare": format_signed(device.headroom)}),
        "stranded after a step": format_size(device.stranded),
        "growth per step": _growth(device),
        "retries": f"{device.retries:,}",
        "device allocs": f"{device.device_allocs:,}",
    }


def _growth(device: DeviceMemory) -> str:
    found = growth(device.steps)
    return "too few steps to tell" if found is None else format_size(found) if found else "none"
