"""PyTorch's setting `garbage_collection_threshold`, written while the script runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchmem.allocator.settings import LAST_PARSED, parse_alloc_conf
from torchmem.sdk.pytorch.allocator_reader import AllocatorReader

THRESHOLD = "garbage_collection_threshold"
# The memory fraction must be below 1. The driver keeps more than the rest for itself.
UNLIMITED_FRACTION = 0.9999
# PyTorch accepts only values below 1.
MAX_THRESHOLD = 0.999


class GarbageCollection:
    """Sets `garbage_collection_threshold` at run time, and keeps the user's settings.

    PyTorch parses all settings anew, so the user's are passed again. It collects only with a memory
    fraction below 1 (CUDACachingAllocator.cpp, 2.13, `garbage_collect_cached_blocks`), and even
    while a CUDA graph is captured, which its cudaFree would invalidate. Needs 2.6, which can read
    the user's own fraction.
    """

    def __init__(self, torch: Any, reader: AllocatorReader) -> None:
        self._torch = torch
        self._reader = reader
        self._written: str | None = None
        self._users_text = ""
        self._devices: set[int] = set()
        self._threshold = MAX_THRESHOLD
        self._is_paused = False

    def set(self, shares: Mapping[int, float]) -> bool:
        """Collect on these devices above the highest of the shares; return False if impossible."""
        text = self._text()
        if text is None or any(self._reader.fraction(device) is None for device in shares):
            return False
        for device in shares:
            if self._reader.fraction(device) == 1.0:
                self._torch.cuda.set_per_process_memory_fraction(UNLIMITED_FRACTION, device)
                self._devices.add(device)
        self._threshold = max(shares.values(), default=MAX_THRESHOLD)
        self._apply(text)
        return True

    def pause(self, is_paused: bool) -> None:
        """Collect nothing while `is_paused`, that is, during a capture."""
        self._is_paused = is_paused
        text = None if self._written is None else self._text()
        if text is not None:
            self._apply(text)

    def _apply(self, text: str) -> None:
        threshold = MAX_THRESHOLD if self._is_paused else self._threshold
        self._written = ",".join(filter(None, (text, f"{THRESHOLD}:{threshold:g}")))
        self._write(self._written)

    def is_own(self, device: int, fraction: float | None) -> bool:
        """Return whether a device's memory fraction is not the user's.

        PyTorch keeps it in bytes, so the value that is read differs slightly from the one set.
        """
        if fraction is None or device not in self._devices:
            return False
        return math.isclose(fraction, UNLIMITED_FRACTION, abs_tol=1e-6)

    def _text(self) -> str | None:
        """Return the user's settings; None if this allocator or those settings rule it out."""
        if self._reader.backend() != "native":
            return None
        current = self._read()
        if current != self._written:
            self._users_text = current
        conf = parse_alloc_conf(self._users_text)
        is_expandable = conf.get("expandable_segments", "").lower() == "true"
        return None if THRESHOLD in conf or is_expandable else self._users_text

    def _read(self) -> str:
        read = getattr(self._torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001
        if read is not None:
            return str(read())
        self._reader.segments()
        return self._reader.settings().get(LAST_PARSED, "")

    def _write(self, text: str) -> None:
        write = getattr(self._torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
        write = write or self._torch._C._cuda_cudaCachingAllocator_set_allocator_settings  # noqa: SLF001
        write(text)
