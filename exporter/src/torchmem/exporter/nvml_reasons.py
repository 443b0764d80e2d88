"""Why NVML or a call of it returns nothing, in words, with what to do about it.

`REASONS` is by the label `reason` of `nvml_up`, `RETURN_CODES` by nvmlReturn_t of nvml.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_UNKNOWN_STEP = "`nvidia-smi` shows the driver's own message."


@dataclass(frozen=True, slots=True)
class NvmlReason:
    """Why NVML does not respond: `words` continue a sentence; `next_step` is a sentence."""

    words: str
    next_step: str = _UNKNOWN_STEP


REASONS: Mapping[str, NvmlReason] = {
    "library_not_found": NvmlReason(
        "the driver's library libnvidia-ml.so.1 was not found",
        "Install the driver, or in a container run it with --gpus all and "
        "NVIDIA_DRIVER_CAPABILITIES=utility.",
    ),
    "driver_not_loaded": NvmlReason(
        "the NVIDIA driver is not loaded", "Load the driver: `nvidia-smi` must work."
    ),
    "driver_library_version_mismatch": NvmlReason(
        "the loaded driver and its library have different versions",
        "The driver was updated while it was loaded: reboot, or reload its modules.",
    ),
    "no_permission": NvmlReason(
        "this user may not use the GPUs",
        "Give this user access to /dev/nvidiactl and /dev/nvidia0.",
    ),
    "function_not_found": NvmlReason(
        "the driver is too old for NVML's nvmlInit_v2", "Update the driver."
    ),
    "gpu_is_lost": NvmlReason(
        "a GPU is lost", "Drain the node and reset the GPU: see the runbook TorchmemGpuLost."
    ),
    "operating_system": NvmlReason("the operating system blocks the GPUs"),
    "uninitialized": NvmlReason("NVML was shut down by another part of the process"),
    "unknown_error": NvmlReason("the driver reports an unknown error"),
    "unexpected_error": NvmlReason(
        "reading it failed unexpectedly", "The exporter's log has the traceback."
    ),
    "timeout": NvmlReason(
        "the driver did not respond in time", "Check whether `nvidia-smi` responds."
    ),
    "pynvml_not_installed": NvmlReason(
        "the Python package nvidia-ml-py is not installed", "pip install 'torchmem[exporter]'"
    ),
}
RETURN_CODES: Mapping[int, str] = {
    1: "NVML is not initialized",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    7: "the list kept growing",
    9: "driver not loaded",
    10: "timeout",
    11: "interrupt request problem",
    12: "library not found",
    13: "function not found",
    14: "corrupted infoROM",
    15: "the GPU is lost",
    16: "the GPU requires a reset",
    17: "blocked by the operating system",
    18: "driver and library have different versions",
    19: "in use",
    20: "insufficient memory",
    21: "no data",
    22: "not supported with ECC enabled",
    23: "insufficient resources",
    24: "not supported at this frequency",
    25: "another version of the argument",
    26: "deprecated",
    27: "not ready",
    28: "the GPU was not found",
    29: "invalid state",
    999: "unknown error",
}


def reason_in_words(reason: str) -> str:
    """Return the words and the label's value: "a GPU is lost (gpu_is_lost)"."""
    known = REASONS.get(reason)
    return f"{known.words} ({reason})" if known else reason


def next_step(reason: str) -> str:
    """Return what to do about it, as a sentence."""
    known = REASONS.get(reason)
    return known.next_step if known else _UNKNOWN_STEP


def code_in_words(code: int | None) -> str:
    """Return a return code as text, such as "NVML return code 13, function not found"."""
    if code is None:
        return "NVML does not list it"
    words = RETURN_CODES.get(code)
    return f"NVML return code {code}, {words}" if words else f"NVML return code {code}"
