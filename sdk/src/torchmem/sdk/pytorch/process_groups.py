"""The process groups of torch.distributed that NCCL or RCCL serves.

NCCL counts the memory of its communicators since 2.29.7, and PyTorch 2.12 hands that on:
`Backend.memory_stats`, `suspend` and `resume` (pytorch/pytorch#176300).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchmem.allocator.process_groups import CommunicatorMemory

UNDESCRIBED = {"", "undefined"}


class TorchProcessGroup:
    """One process group, with the backend that serves its GPU tensors.

    `device` is the one that the script bound to the group, else `only_device`.
    """

    def __init__(
        self, torch: Any, group: Any, backend: Any, name: str, only_device: int | None
    ) -> None:
        self._torch = torch
        self._backend = backend
        described = getattr(group, "group_desc", "")
        self.name = name if described in UNDESCRIBED else str(described)
        bound = getattr(group, "bound_device_id", None)
        self.device = only_device if bound is None else bound.index

    @property
    def is_ready(self) -> bool:
        """Whether NCCL has created the communicators; True if PyTorch cannot tell (before 2.4).

        Before that, `memory_stats` would guess a device and warn about it.
        """
        backend = self._backend
        ask = getattr(backend, "_is_initialized", None)
        return ask is None or bool(ask())

    def collectives(self) -> int | None:
        """Return the number of the newest collective."""
        backend = self._backend
        read = getattr(backend, "_get_sequence_number_for_group", None)
        return None if read is None else int(read())

    def memory(self) -> CommunicatorMemory | None:
        """Return NCCL's counts, which it keeps in variables of this process.

        PyTorch raises RuntimeError if NCCL is older, or does not count (NCCL_DISABLE_MEM_MANAGER).
        """
        read = getattr(self._backend, "memory_stats", None)
        if read is None:
            return None
        try:
            stats = read()
        except RuntimeError:
            return None
        return CommunicatorMemory(stats["persist"], stats["suspend"], bool(stats["suspended"]))

    def suspend(self) -> None:
        """Call `Backend.suspend` when no collective runs any more, as NCCL requires."""
        self._torch.cuda.synchronize(self.device)
        self._backend.suspend()

    def resume(self) -> None:
        """Call `Backend.resume`."""
        self._backend.resume()


def process_groups(torch: Any, only_device: int | None) -> Iterator[TorchProcessGroup]:
    """Yield the process groups that NCCL serves, in the order of their creation.

    torch.distributed must be initialized. `only_device` is the only device that this process uses;
    None if there are several.
    """
    distributed = torch.distributed
    groups = distributed.distributed_c10d._world.pg_names  # noqa: SLF001
    for group, name in list(groups.items()):
        backend = _nccl_backend(torch, group)
        if backend is not None:
            yield TorchProcessGroup(torch, group, backend, str(name), only_device)


def _nccl_backend(torch: Any, group: Any) -> Any | None:
    """Return the backend for GPU tensors, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    try:
        backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
    except RuntimeError:  # the group has no backend for GPUs
        return None
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if "nccl" in backend.name() else None
