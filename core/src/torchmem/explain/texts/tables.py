"""Tables that people paste: `torch.cuda.memory_summary()`, `memory_stats()`, and `nvidia-smi`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torchmem.explain.texts.numbers import MAX_BYTES, MAX_HOLDERS, Holder, size_of

TableKind = Literal["memory_summary", "memory_stats", "nvidia-smi"]
TABLE_TRIGGERS = {"memory summary", "NVIDIA-SMI", "_bytes.all.current"}
MAX_ROWS = 400

_SIZE = r"(\d{1,12}(?:\.\d{1,4})? ?[KMGT]?i?B|\d{1,12}(?:\.\d{1,4})? ?bytes)"
_SUMMARY = re.compile(r"memory summary, device ID (\d{1,4})")
_COUNTS = re.compile(r"CUDA OOMs: (\d{1,12})\s*\|\s*cudaMalloc retries: (\d{1,12})")
_ROW = re.compile(
    r"\|\s*(Allocated|Active|GPU reserved|Reserved|Non-releasable) memory"
    rf"\s*\|\s*{_SIZE}\s*\|\s*{_SIZE}"
)
_STAT = re.compile(
    r"['\"]?(allocated|active|reserved|inactive_split)_bytes\.all\.(current|peak)['\"]?"
    r"\s*[:=,]\s*(\d{1,18})"
)
_NUMBER = re.compile(r"['\"]?(num_ooms|num_alloc_retries)['\"]?\s*[:=,]\s*(\d{1,12})")
_USED = re.compile(r"(\d{1,9})MiB\s*/\s*(\d{1,9})MiB")
_GPU = re.compile(r"^\|\s*(\d{1,3})\s+\S")
_PROCESS = re.compile(
    r"^\|\s*(\d{1,3})\s+(?:\S+\s+\S+\s+)?(\d{1,10})\s+([A-Z+]{1,6})\s+(.{1,80}?)"
    r"\s+(\d{1,9})MiB\s*\|"
)
_NAMES = {
    "Allocated": "allocated",
    "Active": "active",
    "GPU reserved": "reserved",
    "Reserved": "reserved",
    "Non-releasable": "stranded",
    "inactive_split": "stranded",
}


@dataclass(frozen=True, slots=True)
class SmiRow:
    """A row of nvidia-smi: NVML's index, bytes in use and in all, and the processes."""

    gpu: int
    used: int
    total: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """What a table says, in bytes; None if it does not.

    Attributes:
        kind: which table it is.
        gpu: the process's index of the GPU.
        allocated, active, reserved, stranded: bytes at that moment; `stranded` is what PyTorch
            calls non-releasable or inactive split.
        allocated_peak, reserved_peak: their highest values.
        ooms, retries: how often a request has failed, and how often the cache was emptied for one.
        gpus: the GPUs of nvidia-smi.
    """

    kind: TableKind
    gpu: int | None = None
    allocated: int | None = None
    active: int | None = None
    reserved: int | None = None
    stranded: int | None = None
    allocated_peak: int | None = None
    reserved_peak: int | None = None
    ooms: int | None = None
    retries: int | None = None
    gpus: tuple[SmiRow, ...] = ()


def read_table(line: str, following: Callable[[], Iterator[str]]) -> Table | None:
    """Return the table that begins in this line, with the lines after it; None if none does."""
    summary = _SUMMARY.search(line)
    if summary:
        return _summary(int(summary[1]), following())
    if "NVIDIA-SMI" in line and "|" in line:
        return _smi(following())
    if "_bytes.all.current" in line:
        return _stats(line, following())
    return None


def _summary(gpu: int, lines: Iterator[str]) -> Table | None:
    values: dict[str, Any] = {}
    for line in lines:
        counts, row = _COUNTS.search(line), _ROW.search(line)
        if counts:
            values["ooms"], values["retries"] = int(counts[1]), int(counts[2])
        if row:
            name = _NAMES[row[1]]
            values[name] = size_of(row[2])
            if name in {"allocated", "reserved"}:
                values[f"{name}_peak"] = size_of(row[3])
    return Table("memory_summary", gpu, **values) if values else None


def _stats(line: str, lines: Iterator[str]) -> Table | None:
    text = "\n".join([line, *lines])
    values: dict[str, Any] = {}
    for name, moment, number in _STAT.findall(text):
        known = _NAMES.get(name, name)
        size = int(number) if int(number) < MAX_BYTES else None
        if moment == "current":
            values.setdefault(known, size)
        elif known in {"allocated", "reserved"}:
            values.setdefault(f"{known}_peak", size)
    for name, number in _NUMBER.findall(text):
        values.setdefault(name.replace("num_alloc_", "").replace("num_", ""), int(number))
    return Table("memory_stats", **values) if values else None


def _smi(lines: Iterator[str]) -> Table | None:
    gpus: dict[int, tuple[int, int]] = {}
    holders: dict[int, list[Holder]] = {}
    current = None
    for line in lines:
        process = _PROCESS.search(line)
        if process:
            holder = Holder(int(process[2]), int(process[5]) << 20)
            holders.setdefault(int(process[1]), []).append(holder)
            continue
        gpu, used = _GPU.search(line), _USED.search(line)
        current = int(gpu[1]) if gpu else current
        if used and current is not None:
            gpus.setdefault(current, (int(used[1]) << 20, int(used[2]) << 20))
    rows = [
        SmiRow(gpu, used, total, tuple(holders.get(gpu, [])[:MAX_HOLDERS]))
        for gpu, (used, total) in gpus.items()
    ]
    return Table("nvidia-smi", gpus=tuple(rows)) if rows else None
