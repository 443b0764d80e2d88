"""Remedies for an OOM, chosen by its cause, the PyTorch version and the settings in effect.

The settings and the versions that introduced them are from c10/cuda/CUDAAllocatorConfig.h and
c10/core/AllocatorConfig.h, PyTorch 2.1 to 2.13. The OOM report, what-if, the rules, the dashboards
and the runbooks take their allocator settings from this file.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torchmem.allocator.settings import LAST_PARSED, format_alloc_conf, parse_alloc_conf
from torchmem.allocator.sizes import MIB, format_size
from torchmem.explain.communicator_remedies import communicator_remedies
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedy import Remedy, in_order
from torchmem.explain.serving import engine_advice, serves
from torchmem.explain.tensor_remedies import capacity, larger_step, leak, new_phase, smaller
from torchmem.explain.verdict import CAUSE_BY_CHANGE, Gain, OnsetEvidence
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind
from torchmem.sample.sample import Layout, Onset, OomCause, OomDetail

SETTING_REMEDIES: Mapping[RemedyKind, str] = {
    "expandable_segments": "Enable expandable segments, which grow and shrink page by page. "
    "This is the best general remedy.",
    "roundup_power2_divisions": "If tensor sizes vary from step to step, round them up to fewer "
    "sizes so that blocks are reused, or pad or bucket the inputs.",
    "garbage_collection_threshold": "Release old cached segments before the limit is reached, "
    "instead of all of them when it is.",
    "max_split_size_mb": "As a last resort, do not split large blocks, which wastes some memory in "
    "each of them.",
    "large_segment_size_mb": "Allocate smaller segments for tensors of 1 to 10 MiB.",
}
"""The purpose of each allocator setting that torchmem recommends."""

OLD_VARIABLE, NEW_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""The name that all CUDA builds read, and read first."""
ROUNDUP_DIVISIONS = 8
GARBAGE_COLLECTION_THRESHOLD = 0.8
SPLIT_SIZES_MB = (64, 128, 256, 512)
MIN_SPLIT_SIZE_MB = 32  # the setting must exceed 20 MiB
LARGE_SEGMENT_SIZE_MB = 12  # the setting must exceed 10 MiB

LIBRARY_FRACTION = 0.95
"""The memory fraction that leaves a margin for NCCL, cuBLAS, cuDNN and their like."""

WORTH_RELEASING = 0.05
"""The share of the device's memory from which cached memory is worth a remedy."""


def remedies(report: OomReport, refuted: Container[str] = ()) -> tuple[Remedy, ...]:
    """Return what to do, the most promising first, without settings that are in effect already.

    `refuted` are allocator settings under which a replay of the same run fails too.
    """
    found = chain(_all(report), communicator_remedies(report))
    return in_order(remedy for remedy in found if remedy.setting not in refuted)


def _all(report: OomReport) -> Iterator[Remedy]:
    verdict = report.verdict
    if serves(report.device) or report.oom.at_wake_up:
        yield from _serving(report)
        return
    if verdict is None:
        yield from _REMEDIES[report.oom.cause](report)
        return
    why, gains = verdict.why, verdict.material
    yield from _last_error(report)
    if why and why.onset in _BY_ONSET:
        yield from _BY_ONSET[why.onset](report, why)
    for gain in gains:
        yield from _with_gain(_REMEDIES[CAUSE_BY_CHANGE[gain.change]](report), gain)
    is_kept = why is not None and why.onset in {"leak", "garbage"}
    if not gains and not is_kept:
        yield from _REMEDIES[verdict.cause](report)


def _serving(report: OomReport) -> Iterator[Remedy]:
    """Yield remedies for an inference engine, which has no gradients and no optimizer."""
    engine, cause = report.device.engine, report.oom.cause
    if cause in {"fragmentation", "external", "pending"}:
        training = {remedy.text for remedy in smaller(report)}
        yield from (each for each in _REMEDIES[cause](report) if each.text not in training)
    if engine is not None:
        advice = engine_advice(engine, report.oom.requested_bytes)
        yield from (Remedy(each.kind, each.text, each.lines) for each in advice)


def _with_gain(found: Iterable[Remedy], gain: Gain) -> Iterator[Remedy]:
    """Yield the remedies of one cause; the first of them has the gain of the change."""
    for number, remedy in enumerate(found):
        first = number == 0
        yield replace(remedy, gain_bytes=gain.bytes, gain_steps=gain.steps) if first else remedy


def conf_variable(versions: Mapping[str, str]) -> str:
    """Return the environment variable for allocator settings that this version of PyTorch reads.

    Since 2.10, all builds read PYTORCH_ALLOC_CONF. PyTorch 2.9 ignores it without a warning
    (pytorch/pytorch#183387).
    """
    if torch_version(versions) >= (2, 10):
        return NEW_VARIABLE
    is_rocm = "hip" in versions or "+rocm" in versions.get("torch", "")
    return "PYTORCH_HIP_ALLOC_CONF" if is_rocm else OLD_VARIABLE


def export_line(conf: Mapping[str, str], variable: str) -> str:
    """Return the shell line that sets all of `conf`, or that unsets `variable` if it is empty."""
    if not conf:
        return f"unset {variable}"
    return f"export {variable}={shlex.quote(format_alloc_conf(conf))}"


def torch_version(versions: Mapping[str, str]) -> tuple[int, int]:
    """Return the major and minor version of PyTorch; (0, 0) if unknown."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})", versions.get("torch", ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _last_parsed(report: OomReport) -> dict[str, str]:
    return parse_alloc_conf(report.allocator_settings.get(LAST_PARSED, ""))


def _is_set(report: OomReport, name: str) -> bool:
    """Return whether the allocator reports a value other than the default for a setting."""
    return report.allocator_settings.get(name, "False") not in {"False", "0", "0.0", "-1", ""}


def _setting(report: OomReport, key: RemedyKind, value: str, note: str = "") -> Remedy:
    """Return the remedy that adds one setting to those that are already set."""
    variable = conf_variable(report.process.versions)
    present = _last_parsed(report)
    # PyTorch prefers the old name of the variable if both are set.
    unset = (export_line({}, OLD_VARIABLE),) if present and variable == NEW_VARIABLE else ()
    lines = (*unset, export_line(present | {key: value}, variable))
    return Remedy(key, SETTING_REMEDIES[key] + note, lines, key, value)


def _fragmentation(report: OomReport) -> Iterator[Remedy]:
    first, *others = _FRAGMENTATION.get(report.oom.detail or "stranded", _stranded)(report)
    yield first
    yield from _raised_limit(report)
    yield from others


def _stranded(report: OomReport) -> Iterator[Remedy]:
    yield from _expandable(report)
    if not _is_set(report, "roundup_power2_divisions"):
        yield _setting(report, "roundup_power2_divisions", str(ROUNDUP_DIVISIONS))
    yield from _empty_cache(report)
    yield from _garbage_collection(report)
    if _is_set(report, "expandable_segments"):
        yield Remedy(
            "early_tensors",
            "Create long-lived tensors (the model, caches) before the first step, so that they do "
            "not lie between short-lived ones: expandable segments are enabled, so free pages have "
            "been returned already.",
        )
    elif not _is_set(report, "max_split_size"):
        yield _max_split_size(report)


def _expandable(report: OomReport) -> Iterator[Remedy]:
    if not _is_set(report, "expandable_segments"):
        known = "expandable_segments" in report.allocator_settings
        note = "" if known else " Skip it if they are enabled already."
        yield _setting(report, "expandable_segments", "True", note)


def _max_split_size(report: OomReport) -> Remedy:
    """Suggest the largest size at which blocks of the failed request's size are not split."""
    requested = report.oom.requested_bytes or 0
    smaller = [size for size in SPLIT_SIZES_MB if size * MIB < requested]
    return _setting(report, "max_split_size_mb", str(max(smaller, default=MIN_SPLIT_SIZE_MB)))


def _empty_cache(report: OomReport) -> Iterator[Remedy]:
    releasable = _releasable(report)
    if releasable:
        yield Remedy(
            "empty_cache",
            "Release the cache where the run changes phase (training, evaluation, generation), "
            f"before small tensors split it: {format_size(releasable)} was in whole segments.",
            ("torch.cuda.empty_cache()",),
        )


def _releasable(report: OomReport) -> int:
    """Return the cached bytes that could have been released earlier; 0 if they are few."""
    return _worth_releasing(report.layout_before, report.device.total_bytes)


def _worth_releasing(layout: Layout | None, total: int | None) -> int:
    """Return the bytes in whole segments; 0 if they are few or unknown."""
    if layout is None or total is None:
        return 0
    return layout.releasable_bytes if layout.releasable_bytes > WORTH_RELEASING * total else 0


def _garbage_collection(report: OomReport) -> Iterator[Remedy]:
    """Suggest garbage collection where it has an effect.

    The allocator collects only below a memory fraction of 1, and never from expandable segments.
    """
    without_effect = _is_set(report, "garbage_collection_threshold") or _is_set(
        report, "expandable_segments"
    )
    if report.limit_bytes is not None and _releasable(report) and not without_effect:
        yield _setting(report, "garbage_collection_threshold", str(GARBAGE_COLLECTION_THRESHOLD))


def _stream(report: OomReport) -> Iterator[Remedy]:
    yield Remedy(
        "one_stream",
        "Allocate large tensors on one stream: create outputs and buffers before "
        "`with torch.cuda.stream(...)`, and call tensor.record_stream(stream) where another "
        "stream uses them.",
    )
    yield from _empty_cache(report)


def _pool(report: OomReport) -> Iterator[Remedy]:
    if report.layout and report.private_free_bytes >= (report.oom.requested_bytes or 0):
        yield Remedy(
            "shared_pool",
            "Let CUDA graphs share one pool, and delete graphs and MemPools that are not used.",
        )
        if torch_version(report.process.versions) >= (2, 8):
            yield Remedy(
                "pool_on_oom",
                "Let other allocations use the memory of a MemPool when memory runs out.",
                ("torch.cuda.MemPool(use_on_oom=True)",),
            )
        return
    yield from _expandable(report)
    yield from smaller(report)


def _pending(report: OomReport) -> Iterator[Remedy]:
    why = report.verdict.why if report.verdict else None
    is_enough = why is None or why.bytes_per_step is None  # where memory grows, it fails again
    yield Remedy(
        "repeat",
        "Catch torch.OutOfMemoryError and repeat the call, as the block is free now.",
        waits=is_enough,
    )
    yield Remedy(
        "wait",
        "Wait for the other stream before the large allocation, or record fewer tensors on it.",
        ("torch.cuda.current_stream().wait_stream(other)",),
        waits=is_enough,
    )


def _last_error(report: OomReport) -> Iterator[Remedy]:
    if report.last_error_bytes is not None:
        yield Remedy(
            "last_error",
            "Let go of the last error: its traceback keeps the local variables of all functions "
            "that it passed.",
            ("import sys; sys.last_traceback = sys.last_value = sys.last_exc = None",),
            gain_bytes=report.last_error_bytes,
        )


def _garbage(report: OomReport, why: OnsetEvidence) -> Iterator[Remedy]:
    types = report.garbage.types if report.garbage else ()
    others = [kind.name for kind in types if not kind.is_exception]
    if others or not types:
        of = f" of {_listed(others)}" if others else ""
        yield Remedy(
            "cycle",
            f"Break the reference cycle{of}: use weakref.ref where an object refers back to itself "
            "or to its owner, or delete the reference once it is not needed.",
            gain_bytes=why.bytes,
        )
    if len(others) < len(types):
        yield Remedy(
            "stored_exceptions",
            "Do not store exceptions: their tracebacks keep all local variables of the functions "
            "that they passed.",
            ("error = error.with_traceback(None)",),
            gain_bytes=why.bytes,
        )
    is_off = report.garbage is not None and report.garbage.is_collector_off
    reason = "was switched off" if is_off else "counts objects, not their bytes"
    yield Remedy(
        "collect",
        f"Until then, collect every few steps: Python's collector {reason}.",
        ("import gc; gc.collect()",),
        gain_bytes=why.bytes,
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _outside(_: OomReport, why: OnsetEvidence) -> Iterator[Remedy]:
    yield Remedy(
        "find_outside",
        "Find out what took memory outside PyTorch's allocator: another process (nvidia-smi), NCCL "
        "communicators created in a loop, an inference engine.",
        ("nvidia-smi",),
        gain_bytes=why.bytes,
    )


def _small_segment(report: OomReport) -> Iterator[Remedy]:
    in_effect = "large_segment_size_mb" in _last_parsed(report)
    if torch_version(report.process.versions) >= (2, 11) and not in_effect:
        yield _setting(report, "large_segment_size_mb", str(LARGE_SEGMENT_SIZE_MB))
    yield Remedy(
        "more_free",
        "Leave more memory free, for example with a smaller batch: only a few MiB of the GPU is "
        "free.",
    )
    yield from _expandable(report)


def _limit(report: OomReport) -> Iterator[Remedy]:
    if report.oom.detail == "driver":
        kind: RemedyKind = "page_cache" if report.device.shares_host_memory else "driver_limit"
        yield Remedy(kind, f"{REMEDY_WORDS[kind]}.")
        return
    yield from _raised_limit(report)
    yield from _garbage_collection(report)
    yield from smaller(report)


def _raised_limit(report: OomReport) -> Iterator[Remedy]:
    """Suggest the memory fraction that leaves only room for libraries, if the driver had memory.

    The request needed less, but others follow it in the same step.
    """
    total, reserved, limit = report.device.total_bytes, report.reserved_bytes, report.limit_bytes
    requested = report.oom.requested_bytes or 0
    if limit is None or not total or reserved is None or report.driver_free_bytes < requested:
        return
    needed = (reserved + requested) / total
    most = (reserved + report.driver_free_bytes) / total - (1 - LIBRARY_FRACTION)
    if needed < 1:
        # Rounded down for the libraries, but never below what the request needs.
        fraction = max(int(100 * most), math.ceil(100 * needed)) / 100
        yield Remedy(
            "raised_limit",
            f"Raise the memory fraction, which limits the process to {format_size(limit)}: this "
            f"request alone needed {needed:.2f}, and up to {fraction:.2f} is free for the step.",
            (f"torch.cuda.set_per_process_memory_fraction({fraction:.2f}, {report.device.index})",),
        )


def _external(report: OomReport) -> Iterator[Remedy]:
    selector = f'{{uuid="{report.device.uuid}"}}' if report.device.uuid else ""
    yield Remedy(
        "find_processes",
        "Find out what holds the memory: a forgotten process, a notebook, another job, or a second "
        "rank on the same device. PyTorch's error lists the processes that it can see; Prometheus "
        "has their history if the exporter was running.",
        ("nvidia-smi", f"nvml_process_memory_bytes{selector}"),
    )
    yield Remedy(
        "other_gpu",
        "Stop it, move this run to a free device, or check that each rank selects its own device "
        "(LOCAL_RANK).",
    )
    yield Remedy(
        "shared_gpu",
        "If the GPU is shared on purpose, give each process a memory fraction, and release its "
        "cache while it is idle.",
        ("torch.cuda.set_per_process_memory_fraction(0.5)", "torch.cuda.empty_cache()"),
    )


def _library(report: OomReport) -> Iterator[Remedy]:
    # PyTorch's cache is still there when a library fails, so the report's own layout has it.
    cached = _worth_releasing(report.layout or report.layout_before, report.device.total_bytes)
    if cached:
        yield Remedy(
            "cache_for_libraries",
            "Release the cache before the library needs memory: before the first collective, a new "
            "process group, or the first use of a library in a thread or stream. "
            f"{format_size(cached)} was in whole segments.",
            ("torch.cuda.empty_cache()",),
        )
    fraction = _library_fraction(report)
    yield Remedy(
        "room_for_libraries",
        "Keep memory free for libraries: below a memory fraction, PyTorch releases its cache "
        "before it takes the last of the GPU.",
        (f"torch.cuda.set_per_process_memory_fraction({fraction:.2f}, {report.device.index})",),
    )
    yield from smaller(report)


def _library_fraction(report: OomReport) -> float:
    """Return the memory fraction that leaves room for libraries and what is already outside."""
    total, outside = report.device.total_bytes, report.outside_bytes
    if not total or outside is None:
        return LIBRARY_FRACTION
    wanted = max((1 - LIBRARY_FRACTION) * total, report.oom.requested_bytes or 0)
    return max(0.01, int(100 * (total - outside - wanted) / total) / 100)


_REMEDIES: dict[OomCause, Callable[[OomReport], Iterable[Remedy]]] = {
    "capacity": capacity,
    "fragmentation": _fragmentation,
    "limit": _limit,
    "external": _external,
    "pending": _pending,
    "library": _library,
}
_FRAGMENTATION: dict[OomDetail, Callable[[OomReport], Iterable[Remedy]]] = {
    "stranded": _stranded,
    "stream": _stream,
    "pool": _pool,
    "small_segment": _small_segment,
}
_BY_ONSET: dict[Onset, Callable[[OomReport, OnsetEvidence], Iterable[Remedy]]] = {
    "leak": leak,
    "garbage": _garbage,
    "larger_step": larger_step,
    "new_phase": new_phase,
    "outside": _outside,
}
