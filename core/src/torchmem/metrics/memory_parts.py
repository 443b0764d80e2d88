"""What memory is used for: the label, color and letter of each part, wherever it is shown.

Reports, dashboards, the live page and `torchmem top` all read these tables. Each of them has its
own order of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """How a part of memory is shown.

    `label` is its name in the legends of the live page and `torchmem top`, `title` in those of the
    dashboards. `letter` stands for it where there are no colors. `long` is its name in reports, if
    that is not the label.
    """

    label: str
    title: str
    color: str
    letter: str
    meaning: str
    long: str | None = None

    @property
    def words(self) -> str:
        """What reports call the part."""
        return self.long or self.label


COMPONENTS: Mapping[str, MemoryPart] = {
    "parameters": MemoryPart("parameters", "Parameters", "#5844d7", "P", "The model's parameters."),
    "gradients": MemoryPart(
        "gradients", "Gradients", "#bff2ef", "G", "The gradients of the parameters."
    ),
    "gradients_or_step": MemoryPart(
        "gradients, or of this step",
        "Gradients or step",
        "#9c9c00",
        "g",
        "Gradients, or tensors of the running step.",
    ),
    "optimizer_state": MemoryPart(
        "optimizer state",
        "Optimizer state",
        "#368e5e",
        "O",
        "The optimizer's state, such as Adam's moments.",
    ),
    "held": MemoryPart(
        "other tensors",
        "Held between steps",
        "#daa6fc",
        "H",
        "Tensors that live longer than one step.",
        long="other tensors kept between steps",
    ),
    "step": MemoryPart(
        "tensors of the step",
        "Of the current step",
        "#984e82",
        "S",
        "Activations and other tensors of one step.",
        long="allocated within this step",
    ),
    "pending": MemoryPart(
        "waiting for a stream",
        "Waiting for a stream",
        "#1891f6",
        "W",
        "Freed, but still in use by a stream.",
        long="freed, waiting for a stream",
    ),
    "rounding": MemoryPart(
        "rounding of tensors",
        "Rounding",
        "#9faba9",
        "r",
        "What the allocator adds to the size of each tensor.",
    ),
    "other": MemoryPart(
        "named by the script",
        "Tracked by the script",
        "#eff4ac",
        "N",
        "Parts that the script names with session.track.",
    ),
}
"""What holds the bytes of tensors, bottom first; `other` stands for the parts that users name."""

PARTS: Mapping[str, MemoryPart] = {
    "in_use": MemoryPart("tensors", "In use by tensors", "#4e84fc", "T", "Tensors of unknown use."),
    "stranded": MemoryPart(
        "stranded",
        "Stranded",
        "#f09225",
        "!",
        "Free, but beside live tensors: PyTorch cannot return it.",
    ),
    "releasable": MemoryPart(
        "releasable",
        "Cached, releasable",
        "#9fe4eb",
        "R",
        "Free in whole segments: PyTorch can return it.",
    ),
    "private_pools": MemoryPart(
        "private pools",
        "Free in private pools",
        "#9223a8",
        "V",
        "Free in the pools of CUDA graphs and MemPools.",
        long="free in graph and MemPool pools",
    ),
    "cached": MemoryPart(
        "cached",
        "Cached, no snapshot yet",
        "#a1a6df",
        "C",
        "Free in PyTorch's cache, since the newest snapshot.",
        long="free blocks of PyTorch",
    ),
    "outside_allocator": MemoryPart(
        "outside the allocator",
        "Outside the allocator",
        "#fae15f",
        "A",
        "Memory of the ranks that PyTorch's allocator does not know: context, cuBLAS, others.",
    ),
    "communicators": MemoryPart(
        "NCCL",
        "NCCL's communicators",
        "#18cfbc",
        "K",
        "Memory of NCCL's communicators, by NCCL's own count or by their moment.",
        long="NCCL's communicators",
    ),
    "rmm": MemoryPart(
        "RMM",
        "RAPIDS' memory manager",
        "#a4bd6e",
        "M",
        "Memory of RAPIDS' memory manager: its pool, or what is allocated from it.",
        long="RAPIDS' memory manager",
    ),
    "other_processes": MemoryPart(
        "other processes",
        "Other processes",
        "#b36109",
        "X",
        "Memory of all other processes.",
    ),
    "dead_processes": MemoryPart(
        "dead processes",
        "Dead processes",
        "#541613",
        "Q",
        "Memory of processes that are gone. It is unusable until the driver frees it.",
        long="processes that are gone",
    ),
    "driver": MemoryPart("driver", "Driver", "#604763", "D", "What the driver keeps for itself."),
    "not_pytorch": MemoryPart(
        "not PyTorch's",
        "Not PyTorch (no NVML)",
        "#968c95",
        "Z",
        "Libraries, contexts and other processes together.",
        long="outside PyTorch's allocator",
    ),
    "free": MemoryPart(
        "free", "Free", "#a5de79", ".", "Free at the driver.", long="free at the driver"
    ),
}
"""The parts of a device's memory by their names in gpu:torchmem_memory_bytes:sum, bottom first."""
