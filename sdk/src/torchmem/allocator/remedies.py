"""What to do about an OOM: remedies that fit its cause, the PyTorch version and the settings already in force.

Settings and since when they exist: c10/cuda/CUDAAllocatorConfig.h and c10/core/AllocatorConfig.h, PyTorch 2.1 to 2.13.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.settings import LAST_PARSED, parse_alloc_conf
from torchmem.allocator.sizes import MIB, format_size
from torchmem.sample.sample import OomCause, OomDetail

# Shares of the device's memory and of a step's memory from which on a remedy is worth its line.
WORTH_RELEASING = 0.05
MOSTLY_ACTIVATIONS = 0.5


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do: a sentence, and lines to type."""

    text: str
    lines: tuple[str, ...] = ()


def remedies(report: OomReport) -> tuple[Remedy, ...]:
    """What to do, the most promising first; never what is in force already."""
    return tuple(_REMEDIES[report.oom.cause](report))


def conf_variable(versions: Mapping[str, str]) -> str:
    """The environment variable of the allocator's settings: since 2.10 one name for all builds of PyTorch."""
    if _version(versions) >= (2, 10):
        return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_HIP_ALLOC_CONF" if "hip" in versions else "PYTORCH_CUDA_ALLOC_CONF"


def _version(versions: Mapping[str, str]) -> tuple[int, int]:
    """Major and minor version of PyTorch; (0, 0) when it is unknown."""
    found = re.match(r"(\d{1,3})\.(\d{1,3})", versions.get("torch", ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _setting(report: OomReport, text: str, key: str, value: str) -> Remedy:
    """A remedy that is a setting, as the line to type: added to what is set already."""
    variable = conf_variable(report.process.versions)
    present = parse_alloc_conf(report.allocator_settings.get(LAST_PARSED, ""))
    conf = ",".join(f"{name}:{word}" for name, word in (present | {key: value}).items())
    # An older name that is still set would win.
    older = (
        ("unset PYTORCH_CUDA_ALLOC_CONF",) if present and variable == "PYTORCH_ALLOC_CONF" else ()
    )
    return Remedy(text, (*older, f"export {variable}={shlex.quote(conf)}"))


def _is_set(report: OomReport, name: str) -> bool:
    """Whether a setting is away from its default, by the allocator's own account."""
    return report.allocator_settings.get(name, "False") not in {"False", "0", "0.0", "-1", ""}


def _fragmentation(report: OomReport) -> Iterator[Remedy]:
    yield from _FRAGMENTATION[report.oom.detail or "stranded"](report)


def _stranded(report: OomReport) -> Iterator[Remedy]:
    yield from _expandable(report)
    if not _is_set(report, "roundup_power2_divisions"):
        yield _setting(
            report,
            "If tensor sizes vary from step to step, round them up to a few sizes so that blocks are used again; or "
            "pad or bucket the inputs.",
            "roundup_power2_divisions",
            "8",
        )
    yield from _empty_cache(report)
    yield from _garbage_collection(report)
    if _is_set(report, "expandable_segments"):
        yield Remedy(
            "Expandable segments are on, so free pages went back already: create what lives long (model, optimizer "
            "state, caches) before the first step, so that it does not lie between short-lived tensors."
        )
    elif not _is_set(report, "max_split_size"):
        yield _max_split_size(report)


def _expandable(report: OomReport) -> Iterator[Remedy]:
    if not _is_set(report, "expandable_segments"):
        known = "expandable_segments" in report.allocator_settings
        text = "Let segments grow and shrink page by page: the best general remedy"
        text += "." if known else ", if it is not on already."
        yield _setting(report, text, "expandable_segments", "True")


def _max_split_size(report: OomReport) -> Remedy:
    """A size that keeps blocks like the failed one whole; a setting must be over 20 MiB."""
    size = next(
        (size for size in (512, 256, 128, 64) if size * MIB < report.oom.requested_bytes), 32
    )
    text = "As a last resort keep large blocks whole, at the price of some waste in each."
    return _setting(report, text, "max_split_size_mb", str(size))


def _empty_cache(report: OomReport) -> Iterator[Remedy]:
    released = _releasable(report)
    if released:
        yield Remedy(
            f"{format_size(released)} lay cached in whole segments: where the run changes its phase "
            "(training, evaluation, generation), return them before small tensors split them.",
            ("torch.cuda.empty_cache()",),
        )


def _releasable(report: OomReport) -> int:
    """Bytes of the cache that could have been returned before; 0 when they are few."""
    before, total = report.layout_before, report.device.total_bytes
    worthy = (
        before is not None
        and total is not None
        and before.releasable_bytes > WORTH_RELEASING * total
    )
    return before.releasable_bytes if before is not None and worthy else 0


def _garbage_collection(report: OomReport) -> Iterator[Remedy]:
    """Only with a memory fraction below 1 does the allocator look at this setting; it skips expandable segments."""
    collected = _is_set(report, "garbage_collection_threshold") or _is_set(
        report, "expandable_segments"
    )
    if report.limit_bytes is not None and _releasable(report) and not collected:
        text = "Return old cached segments before the limit is reached, not all of them when it is."
        yield _setting(report, text, "garbage_collection_threshold", "0.8")


def _stream(report: OomReport) -> Iterator[Remedy]:
    yield Remedy(
        "Allocate large tensors on one stream: create outputs and buffers before `with torch.cuda.stream(...)`, and "
        "call tensor.record_stream(stream) where another stream uses them."
    )
    yield from _empty_cache(report)


def _pool(report: OomReport) -> Iterator[Remedy]:
    if report.layout and report.layout.private_free_bytes >= report.oom.requested_bytes:
        yield Remedy(
            "Let CUDA graphs share one pool, and drop graphs and MemPools that are no longer replayed."
        )
        if _version(report.process.versions) >= (2, 8):
            yield Remedy("Allow a MemPool to help out.", ("torch.cuda.MemPool(use_on_oom=True)",))
        return
    yield from _expandable(report)
    yield from _smaller()


def _pending(_: OomReport) -> Iterator[Remedy]:
    yield Remedy(
        "Catch torch.OutOfMemoryError and try the same call once more: the block is free now."
    )
    yield Remedy(
        "Wait for the other stream before the large allocation, or record fewer tensors on it.",
        ("torch.cuda.current_stream().wait_stream(other)",),
    )


def _small_segment(report: OomReport) -> Iterator[Remedy]:
    in_force = "large_segment_size_mb" in parse_alloc_conf(
        report.allocator_settings.get(LAST_PARSED, "")
    )
    if _version(report.process.versions) >= (2, 11) and not in_force:
        yield _setting(
            report, "Take smaller segments for small tensors.", "large_segment_size_mb", "12"
        )
    yield Remedy(
        "The device is full but for some MiB: leave more room, with a smaller batch first."
    )
    yield from _expandable(report)


def _capacity(report: OomReport) -> Iterator[Remedy]:
    total = report.device.total_bytes
    if total is not None and report.oom.requested_bytes > total:
        yield Remedy(
            "Look at the line that failed: one tensor of that size is most likely a wrong shape."
        )
        return
    smaller, shard = tuple(_smaller()), _shard(report)
    yield from (
        (*smaller, shard) if _activations(report) >= MOSTLY_ACTIVATIONS else (shard, *smaller)
    )


def _activations(report: OomReport) -> float:
    """Share of the tensors' bytes that came within the step: allocated now against the least between steps.

    1 when nothing is known of the time between steps.
    """
    allocator = report.device.allocator
    between = [
        size
        for size, steps in zip(report.trend.allocated_bytes, report.trend.steps, strict=True)
        if size and steps
    ]
    now = allocator.allocated_bytes.total if allocator else 0
    return 1 - min(between) / now if between and now else 1.0


def _smaller() -> Iterator[Remedy]:
    yield Remedy(
        "Use a smaller batch, or shorter sequences, and accumulate gradients over several of them."
    )
    yield Remedy(
        "Recompute activations in the backward pass instead of keeping them.",
        ("torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",),
    )
    yield Remedy(
        "Keep activations in 16 bits, unless they are already.",
        ("with torch.autocast('cuda', dtype=torch.bfloat16): ...",),
    )


def _shard(report: OomReport) -> Remedy:
    world = report.process.world_size or 1
    ranks = f"the {world} ranks" if world > 1 else "several GPUs"
    return Remedy(
        f"Shard parameters, gradients and optimizer state over {ranks} (FSDP, ZeRO), unless they are already; or hold "
        "optimizer state in host memory or in 8 bits."
    )


def _limit(report: OomReport) -> Iterator[Remedy]:
    total, reserved = report.device.total_bytes, report.reserved_bytes
    if total and reserved is not None:
        needed = (reserved + report.oom.requested_bytes) / total
        index = report.device.index
        if needed < 1:
            raised = min(1.0, int(needed * 100 + 2) / 100)
            text = f"Raise the limit: this request needed a fraction of {needed:.2f}, and the driver had the memory."
            yield Remedy(
                text, (f"torch.cuda.set_per_process_memory_fraction({raised:.2f}, {index})",)
            )
    yield from _garbage_collection(report)
    yield from _smaller()


def _external(report: OomReport) -> Iterator[Remedy]:
    where = f'{{uuid="{report.device.uuid}"}}' if report.device.uuid else ""
    yield Remedy(
        "See who holds the memory: a forgotten process, a notebook, another job, a second rank on the same device. "
        "PyTorch's own error names those it can see; Prometheus remembers them, if the exporter ran.",
        ("nvidia-smi", f"nvml_process_memory_bytes{where}"),
    )
    yield Remedy(
        "End it, move this run to a free device, or check that each rank sets its own device (LOCAL_RANK)."
    )
    yield Remedy(
        "If the device is shared on purpose, give every process its share, and let it return its cache when it rests.",
        ("torch.cuda.set_per_process_memory_fraction(0.5)", "torch.cuda.empty_cache()"),
    )


_REMEDIES: dict[OomCause, Callable[[OomReport], Iterable[Remedy]]] = {
    "capacity": _capacity,
    "fragmentation": _fragmentation,
    "limit": _limit,
    "external": _external,
}
_FRAGMENTATION: dict[OomDetail, Callable[[OomReport], Iterable[Remedy]]] = {
    "stranded": _stranded,
    "stream": _stream,
    "pool": _pool,
    "pending": _pending,
    "small_segment": _small_segment,
}
