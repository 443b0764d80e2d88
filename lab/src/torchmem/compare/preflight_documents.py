"""The figures in the JSON documents of `torchmem preflight`, described in docs/preflight.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmem.compare.measured import Ending, Kind, Measured, Side
from torchmem.compare.usage import Usage, Use
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
    """Read the document of a run, a search, a sweep or a matrix. Raises UsageError."""
    try:
        document = printable_json(strict_json(read_untrusted(path, MAX_DOCUMENT_BYTES)[0]))
    except (OSError, UntrustedFileError) as error:
        raise UsageError(f"{name} cannot be read ({error}): name another file.") from None
    except ValueError as error:
        raise UsageError(f"{name} {error}: write it again with --json.") from None
    try:
        if document["kind"] != "bisect":
            return _side(document, name)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise UsageError(
            f"{name} is not a document of schema {SCHEMA} of `torchmem preflight --json`: write it "
            "again with this version of torchmem."
        ) from None
    raise UsageError(f"{name} is a bisection, which compares commits itself: read its verdict.")


def _side(document: Mapping[str, Any], name: str) -> Side:
    if document["schema"] != SCHEMA:
        raise ValueError("another schema")
    kind = document["kind"]
    noun = {
        "run": "a preflight",
        "find_batch": "a search for the largest batch",
        "sweep": "a preflight of several ranks",
        "matrix": "a matrix of preflights",
    }[kind]
    parts, outcome = dict(_PARTS[kind](document)), _first_outcome(document)
    kinds: dict[str, Kind] = {"find_batch": "find_batch", "sweep": "sweep", "matrix": "matrix"}
    facts, sentence = _facts(document, outcome), str(document["verdict"]["sentence"])
    return Side(name, noun, kinds.get(kind, "run"), parts, facts, sentence)


def _run(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    verdict = document["verdict"]
    outcome = convert(document["outcome"], _Outcome)
    need = convert(document["need"], _Outcome) if document.get("need") else None
    return _of_outcome("", outcome, verdict["fits"], need)


def _search(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for each in document["tries"]:
        label = f"{document['option']} {each['value']}, {each['steps']} steps"
        yield from _of_outcome(label, convert(each["outcome"], _Outcome), each["fits"])


def _sweep(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for each in document["places"]:
        label = f"rank {each['rank']} of {each['world_size']}"
        yield from _of_outcome(label, convert(each["outcome"], _Outcome), each["fits"])


def _matrix(document: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    for each in document["cells"]:
        label = " ".join(f"{name}={value}" for name, value in each["values"].items())
        yield from _of_outcome(label, convert(each["outcome"], _Outcome), each["fits"])


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[tuple[str, Measured]]]] = {
    "run": _run,
    "find_batch": _search,
    "sweep": _sweep,
    "matrix": _matrix,
}


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
                usage=Usage(whole.peak_allocated, whole.peak_reserved, uses=whole.uses),
                ending=ending,
                fits=fits,
                total=device.total,
                headroom=device.headroom if ending == "whole" else None,
                retries=device.retries,
                steps=outcome.steps or outcome.calls,
                is_whole_peak=ending == "whole" or (need is not None and need.ended != "oom"),
            ),
        )


def _first_outcome(document: Mapping[str, Any]) -> Mapping[str, Any]:
    name = {"find_batch": "tries", "sweep": "places", "matrix": "cells"}.get(document["kind"])
    return dict(document["outcome"] if name is None else document[name][0]["outcome"])


def _facts(document: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, str]:
    facts = {
        "PyTorch": str(outcome.get("torch_version") or ""),
        "GPU": f"{document['gpu_model']['product']} (phantom)",
        "alloc_conf": document["alloc_conf"] or "",
        "steps": str(document["steps"]),
        "command": " ".join(map(str, document["command"])),
    }
    return {name: value for name, value in facts.items() if value}
