"""Checks of the driver and of NVML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.doctor.check import Check, Place, Status

if TYPE_CHECKING:
    from torchmem.exporter.gpus import Nvml

# "Kernel Module  580.65.06", or "Open Kernel Module for x86_64  580.65.06".
_VERSION = re.compile(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)")


def open_nvml() -> Nvml | None:
    """Return NVML; None without the exporter's packages."""
    try:
        from torchmem.exporter.driver import PyNvml
    except ModuleNotFoundError:
        return None
    return PyNvml()


def checks(place: Place, nvml: Callable[[], Nvml | None] = open_nvml) -> Iterator[Check]:
    """Yield the checks of the driver, NVML, and every GPU."""
    driver = kernel_driver(place.proc)
    if driver is None:
        yield Check(
            "NVIDIA driver",
            "note",
            "no NVIDIA driver is loaded here, so there is no GPU to observe",
            "On a machine with a GPU: `nvidia-smi` must work before torchmem can.",
        )
    else:
        yield Check("NVIDIA driver", "ok", driver)
    opened = nvml()
    if opened is None:
        yield Check("NVML", "note", "not checked: the exporter's packages are not installed")
        return
    yield from _nvml(opened, is_expected=driver is not None)


def kernel_driver(proc: Path) -> str | None:
    """Return the version in /proc/driver/nvidia/version; None if no driver is loaded."""
    try:
        text = (proc / "driver" / "nvidia" / "version").read_text(errors="replace")
    except OSError:
        return None
    match = _VERSION.search(text)
    return match[1] if match else "loaded, of an unknown version"


def _nvml(nvml: Nvml, *, is_expected: bool) -> Iterator[Check]:
    from torchmem.exporter.driver import Driver
    from torchmem.exporter.nvml import NvmlDownError
    from torchmem.exporter.nvml_reasons import REASONS, code_in_words, next_step, reason_in_words

    driver = Driver(nvml)
    try:
        gpus, versions = driver.list_gpus(), nvml.versions()
    except NvmlDownError as error:
        status: Status = "problem" if is_expected else "note"
        found = f"does not respond: {reason_in_words(error.reason)}"
        yield Check("NVML", status, found, next_step(error.reason))
        return
    finally:
        driver.close()
    yield Check("NVML", "ok", f"responds, driver {versions.driver or 'of an unknown version'}")
    if versions.outdated_binding:
        outdated = versions.outdated_binding
        yield Check("pynvml", "problem", str(outdated), outdated.remedy)
    for gpu in gpus.present:
        yield Check(f"GPU {gpu.index}", "ok", f"{gpu.name or 'unnamed'}, {gpu.uuid}")
    for (index, uuid), code in gpus.lost.items():
        yield Check(
            f"GPU {index or uuid}",
            "problem",
            f"does not respond: {code_in_words(code)}",
            REASONS["gpu_is_lost"].next_step,
        )
