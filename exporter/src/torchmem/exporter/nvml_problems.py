"""Why NVML does not respond, in words: the values of the label `reason` of `nvml_up`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvmlProblem:
    """What is wrong, as a sentence, and what to do about it."""

    text: str
    step: str


_SEE_DRIVER = "`nvidia-smi` shows the driver's own message."
PROBLEMS: Mapping[str, NvmlProblem] = {
    "library_not_found": NvmlProblem(
        "The library of the NVIDIA driver (libnvidia-ml.so.1) is not installed here.",
        "Install the driver, or in a container run it with --gpus all and "
        "NVIDIA_DRIVER_CAPABILITIES=utility.",
    ),
    "driver_not_loaded": NvmlProblem(
        "The NVIDIA driver is not loaded.", "Load the driver: `nvidia-smi` must work."
    ),
    "driver_library_version_mismatch": NvmlProblem(
        "The NVIDIA driver and its library have different versions.",
        "The driver was updated while it was loaded: reboot, or reload its modules.",
    ),
    "no_permission": NvmlProblem(
        "The user of the exporter may not use the NVIDIA driver.",
        "Give this user access to /dev/nvidiactl and /dev/nvidia0.",
    ),
    "pynvml_not_installed": NvmlProblem(
        "The Python package nvidia-ml-py is not installed.", "pip install 'torchmem[exporter]'"
    ),
    "timeout": NvmlProblem("The NVIDIA driver did not respond in time.", _SEE_DRIVER),
    "uninitialized": NvmlProblem("The NVIDIA driver has closed its library.", _SEE_DRIVER),
    "function_not_found": NvmlProblem(
        "The library of the NVIDIA driver is too old.", "Update the driver."
    ),
    "gpu_is_lost": NvmlProblem(
        "A GPU has fallen off the bus, and the NVIDIA driver does not start.",
        "Look for the XID in `dmesg`, and reboot the machine.",
    ),
    "operating_system": NvmlProblem("The operating system refused the NVIDIA driver.", _SEE_DRIVER),
    "unknown_error": NvmlProblem("The NVIDIA driver failed for an unknown reason.", _SEE_DRIVER),
    "unexpected_error": NvmlProblem(
        "Reading the NVIDIA driver failed in an unexpected way.",
        "The exporter's log has the error.",
    ),
}


def nvml_problem(reason: str) -> NvmlProblem:
    """Return the words for a reason, which may be one that this version does not know."""
    unknown = NvmlProblem(f"The NVIDIA driver does not respond ({reason}).", _SEE_DRIVER)
    return PROBLEMS.get(reason, unknown)
