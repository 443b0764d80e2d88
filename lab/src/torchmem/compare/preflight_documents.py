"""The figures in the JSON documents of `torchmem preflight` (docs/preflight-reference.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmem.compare.measured import Ending, Kind, Measured, Side
from torchmem.compare.peak_memory import PeakMemory, Use
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import (
    UntrustedFileError,
    convert,
    printable_json,
    read_untrusted,
    strict_json,
)

SCHEMA = 1
MAX_DOCUMENT_BYTES = 256 << 20
PHANTOM = " (phantom)"
"""Ends the name of a GPU that was a phantom."""


@dataclass(frozen=True, slots=True)
class _Device:
    device: int
    total: int
    headroom: int
    peak_allocated: int
    peak_reserved: int
    retries: int
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class _Outcome:
    ended: str
    steps: int
    devices: tuple[_Device, ...]
    calls: int = 0
    torch_version: str = ""


def read(path: Path, name: str) -> Side:
    """Read the document of a run, a search or a matrix. Raises UsageError."""
    try:
        document = printable_json(strict_json(read_untrusted(path, MAX_DOCUMENT_BYTES)[0]))
    except (OSError, UntrustedFileError) as error:
        raise UsageError(f"{name} cannot be read ({error}): name another file.") from None
    except ValueError as error:
        raise UsageError(f"{name} {error}: write it again with --json.") from None
    try:
        return _side(document, name)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UsageError(
            f"{name} is not a document of schema {SCHEMA} of `torchmem preflight --json`: write it "
            "again with this version of torchmem."
        ) from None


@dataclass(frozen=True, slots=True)
class _Table:
    """A document with several runs. key: of the list of runs. label: names one of them."""

    kind: Kind
    noun: str
    key: str
    label: Callable[[Mapping[str, Any], Mapping[str, Any]], str]


_TABLES = {
    "find_batch": _Table(
        "find_batch",
        "a search for the largest batch",
        "tries",
        lambda document, run: f"{document['option']} {run['value']}, {run['steps']} steps",
    ),
    "matrix": _Table(
        "matrix",
        "a matrix of preflights",
        "cells",
        lambda _, run: " ".join(f"{name}={value}" for name, value in run["values"].items()),
    ),
}


def _side(document: Mapping[str, Any], name: str) -> Side:
    if document["schema"] != SCHEMA:
        raise ValueError("another schema")
    sentence = str(document["verdict"]["sentence"])
    if document["kind"] == "run":
        parts, first = dict(_run(document)), document["outcome"]
        return Side(name, "a preflight", "run", parts, _facts(document, first), sentence)
    table = _TABLES[document["kind"]]
    runs = document[table.key]
    parts = {}
    for run in runs:
        outcome = convert(run["outcome"], _Outcome)
        parts |= dict(_of_outcome(table.label(document, run), outcome, run["fits"]))
    facts = _facts(document, runs[0]["outcome"])
    return Side(name, table.noun, table.kind, parts, facts, sentence)


def _run(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    outcome = convert(document["outcome"], _Outcome)
    need = convert(document["need"], _Outcome) if document.get("need") else None
    return _of_outcome("", outcome, document["verdict"]["fits"], need)


def _of_outcome(
    label: str, outcome: _Outcome, fits: Any, need: _Outcome | None = None
) -> Iterator[tuple[str, Measured]]:
    """Yield the figures of each GPU. need: the same run with more memory, if it ran out of it."""
    if type(fits) is not bool and fits is not None:
        raise ValueError("fits has a wrong value")
    if any(min(each.peak_allocated, each.peak_reserved) < 0 for each in outcome.devices):
        raise ValueError("a peak is negative")
    larger = {device.device: device for device in need.devices} if need else {}
    ending: Ending = "oom" if outcome.ended == "oom" else "whole"
    for device in outcome.devices:
        place = f"cuda:{device.device}" if len(outcome.devices) > 1 or not label else ""
        whole = larger.get(device.device, device)
        yield (
            f"{label} {place}".strip(),
            Measured(
                memory=PeakMemory(whole.peak_allocated, whole.peak_reserved, uses=whole.uses),
                ending=ending,
                fits=fits,
                total=device.total,
                headroom=device.headroom if ending == "whole" else None,
                retries=device.retries,
                steps=outcome.steps or outcome.calls,
                is_whole_peak=ending == "whole" or (need is not None and need.ended != "oom"),
            ),
        )


def _facts(document: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, str]:
    facts = {
        "PyTorch": str(outcome.get("torch_version") or ""),
        "GPU": f"{document['gpu_model']['product']}{PHANTOM}",
        "alloc_conf": document["alloc_conf"] or "",
        "steps": str(document["steps"]),
        "command": " ".join(map(str, document["command"])),
    }
    return {name: value for name, value in facts.items() if value}
