"""Who holds the memory of the GPUs of a node, as far as NVML and /proc together tell.

Without an exporter that sees the node's processes, nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmem.sample.sample import Process


@dataclass(frozen=True, slots=True)
class DeadProcess:
    """A process that is gone, and the bytes that NVML says it holds on a GPU.

    `facts`: labels of `nvml_process_info` that were known of it, such as its user, run and rank.
    """

    pid: int
    bytes: int
    facts: Mapping[str, str] = field(default_factory=dict)

    def was(self, process: Process) -> bool:
        """Return whether it was of another launch of a process's run, by the same user."""
        launch, other = self.facts.get("launch"), process.launch
        if launch is None or other is None or self.facts.get("run") != process.run:
            return False
        return launch != other and launch.partition("-")[0] == other.partition("-")[0]


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A compute instance of a GPU; `profile`: such as 1g.10gb."""

    gpu_instance: int
    compute_instance: int
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who was given a GPU, and for how many seconds it has had no process since.

    `holders`: their labels in `nvml_gpu_assignment_info`, such as the Slurm job or the pod. `mig`:
    the MIG device, if it is not the whole GPU.
    """

    holders: tuple[Mapping[str, str], ...]
    empty_seconds: float
    mig: MigDevice | None = None


@dataclass(frozen=True, slots=True)
class GpuHolders:
    """What is known of the processes on the GPUs of a node.

    `held`: NVML's bytes of each process, by the device's UUID or name and the pid. `dead`: the
    processes that are gone and still hold memory, by the GPU's UUID, those with most bytes first.
    `assigned`: whom the kubelet or Slurm has given a GPU or its MIG devices, by the GPU's UUID.
    """

    held: Mapping[tuple[str, int], int] = field(default_factory=dict)
    dead: Mapping[str, Sequence[DeadProcess]] = field(default_factory=dict)
    assigned: Mapping[str, Sequence[Assignment]] = field(default_factory=dict)
