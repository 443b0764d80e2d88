"""The baseline: one JSON file per repository with what each test or run used.

It is reviewed like a lock file: sorted, one line for each use, and without anything that differs
from machine to machine.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchmem.allocator.sizes import format_size
from torchmem.compare.peak_memory import (
    MIN_SHARE,
    PeakDiff,
    PeakMemory,
    diff,
    exceeds,
    peak_of,
    peak_values,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, strict_json

SCHEMA = 1
DEFAULT_TOLERANCE = 0.01
MAX_BASELINE_BYTES = 256 << 20
_PERCENT = re.compile(r"(\d{1,4}(?:\.\d{1,6})?)\s*%")

Outcome = Literal["same", "more", "less", "new", "other"]
"""How memory compares: as much within the tolerance, more, less, not in the baseline, or not
comparable."""


@dataclass(frozen=True, slots=True)
class BaselineEntry:
    """What one test or run used, and where: `torch` is PyTorch's version with its CUDA."""

    memory: PeakMemory
    gpu_model: str
    torch: str


@dataclass(frozen=True, slots=True)
class Compared:
    """One entry against the baseline. diff: None if there is nothing to compare with."""

    name: str
    entry: BaselineEntry
    outcome: Outcome
    sentence: str
    diff: PeakDiff | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """The entries of a baseline file by name: a test's id, or a command."""

    entries: Mapping[str, BaselineEntry] = field(default_factory=dict)

    def compare(
        self, name: str, now: BaselineEntry, tolerance: float = DEFAULT_TOLERANCE
    ) -> Compared:
        """Compare what a test or run used now. Only the same PyTorch and GPU model compare."""
        before = self.entries.get(name)
        if before is None:
            return Compared(name, now, "new", f"{name} is not in the baseline: save it again.")
        other = _other(before, now)
        if other:
            sentence = (
                f"the baseline of {name} is of {other[0]}, and this is {other[1]}: they are not "
                "compared, so save the baseline again."
            )
            return Compared(name, now, "other", sentence)
        condensed = now.memory.condensed()
        found = diff(before.memory, condensed)
        outcome = _outcome(found, tolerance)
        return Compared(name, now, outcome, _sentence(name, found, outcome), found)


@dataclass(frozen=True, slots=True)
class BaselineOptions:
    """Where to save, what to compare with and how, and the file for a pull request's comment."""

    save: Path | None
    baseline: Baseline | None
    tolerance: float
    markdown: Path | None

    @classmethod
    def checked(
        cls, save: Path | None, baseline: Path | None, tolerance: str, markdown: Path | None
    ) -> BaselineOptions:
        """Check what the flags of `baseline_flags` say, "" for no tolerance. Raises UsageError."""
        for path in (save, markdown):
            check_output(path)
        accepted = parse_tolerance(tolerance) if tolerance else DEFAULT_TOLERANCE
        return cls(save, load(baseline) if baseline else None, accepted, markdown)

    def compare(self, found: Mapping[str, BaselineEntry]) -> list[Compared]:
        """Return how the entries compare; nothing without a baseline."""
        if self.baseline is None:
            return []
        return [self.baseline.compare(name, entry, self.tolerance) for name, entry in found.items()]


def load(path: Path) -> Baseline:
    """Read a baseline. Raises UsageError if the file is missing, damaged, or of a newer version."""
    try:
        values = strict_json(read_untrusted(path, MAX_BASELINE_BYTES)[0])
    except FileNotFoundError:
        raise UsageError(
            f"there is no baseline {path}: save one first, with the option to save a baseline."
        ) from None
    except UntrustedFileError as error:
        raise UsageError(f"{path} {error}: name a baseline that torchmem has saved.") from None
    except ValueError as error:
        raise UsageError(f"{path} {error}: restore it, or save the baseline again.") from None
    try:
        return Baseline(dict(_entries(values)))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{path} is not a baseline of schema {SCHEMA}: save it again with this version of "
            "torchmem."
        ) from None


def save(path: Path, entries: Mapping[str, BaselineEntry]) -> None:
    """Add entries to a baseline file, or replace those of the same name. Raises UsageError."""
    known = load(path).entries if path.exists() else {}
    text = document({**known, **entries})
    try:
        # Other processes read the file while it is replaced.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        # The mode of a temporary file is 0600, and a baseline is a file of the repository.
        Path(file.name).chmod(0o644)
        os.replace(file.name, path)  # noqa: PTH105 - raises with both names
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}): name another file for the baseline."
        ) from None


def entries(
    name: str, devices: Mapping[int, PeakMemory], gpu_model: str, torch: str
) -> dict[str, BaselineEntry]:
    """Return what one test or run used, by its name and, if there are several, by GPU."""
    several = len(devices) > 1
    return {
        f"{name} on cuda:{device}" if several else name: BaselineEntry(memory, gpu_model, torch)
        for device, memory in devices.items()
    }


def check_output(path: Path | None) -> None:
    """Raise UsageError if an output file's directory is missing, or the file is a directory."""
    if path and not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}: create it first.")
    if path and path.is_dir():
        raise UsageError(f"{path} is a directory: name a file in it.")


def document(entries: Mapping[str, BaselineEntry]) -> str:
    """Return the text of the file, the same for the same entries."""
    blocks = ",\n".join(_block(name, entries[name]) for name in sorted(entries))
    return f'{{\n"schema": {SCHEMA},\n"entries": {{\n{blocks}\n}}\n}}\n'


def parse_tolerance(text: str) -> float:
    """Return the share of a tolerance such as "2%". Raises UsageError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is not a tolerance: write it in percent, such as 2%.")
    return float(match[1]) / 100


def variation(peaks: list[int], tolerance: float) -> str | None:
    """Return by how much the peaks of equal runs differ, if that is beyond the tolerance."""
    least, most = min(peaks), max(peaks)
    if not exceeds(least, most, tolerance):
        return None
    return (
        f"peak allocated varies by {format_size(most - least)} ({(most - least) / least:.1%}) "
        f"between {len(peaks)} runs of the same code, from {format_size(least)} to "
        f"{format_size(most)}: set a seed, or a larger tolerance."
    )


def _entries(values: Any) -> Iterator[tuple[str, BaselineEntry]]:
    if values["schema"] != SCHEMA:
        raise ValueError("another schema")
    for name, entry in values["entries"].items():
        torch, gpu_model = entry["torch"], entry["gpu_model"]
        if not (isinstance(torch, str) and isinstance(gpu_model, str)):
            raise TypeError("not text")
        yield name, BaselineEntry(peak_of(entry), gpu_model, torch)


def _block(name: str, entry: BaselineEntry) -> str:
    values = peak_values(entry.memory.condensed(MIN_SHARE))
    uses = values.pop("uses", [])
    head = {"torch": entry.torch, "gpu_model": entry.gpu_model, **values}
    lines = ",\n".join(json.dumps(use) for use in uses)
    fields = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    listed = f',\n"uses": [\n{lines}\n]' if uses else ""
    return f"{json.dumps(name)}: {{\n{fields}{listed}\n}}"


def _other(before: BaselineEntry, now: BaselineEntry) -> tuple[str, str] | None:
    if before.torch != now.torch:
        return f"PyTorch {before.torch}", f"PyTorch {now.torch}"
    return (before.gpu_model, now.gpu_model) if before.gpu_model != now.gpu_model else None


def _outcome(found: PeakDiff, tolerance: float) -> Outcome:
    before, after = found.before.peak_allocated, found.after.peak_allocated
    if before is None or after is None:
        return "other"
    if exceeds(before, after, tolerance):
        return "more"
    return "less" if after < before * (1 - tolerance) else "same"


def _sentence(name: str, found: PeakDiff, outcome: Outcome) -> str:
    before, after = found.before.peak_allocated, found.after.peak_allocated
    if before is None or after is None:
        return f"{name}: the peak of one of the two is unknown, so they are not compared."
    sizes = f"{format_size(after)} instead of {format_size(before)}"
    words = {"more": "more memory", "less": "less memory"}.get(outcome, "as much memory")
    change = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{name} needs {words}: peak allocated {sizes}{change}."
