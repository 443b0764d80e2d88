"""The interface between the SDK and an allocator: PyTorch's or the simulator's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import ref

from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sample.sample import PinnedMemory

if TYPE_CHECKING:
    from torchmem.allocator.process_groups import ProcessGroup
    from torchmem.allocator.tensor_groups import TensorGroup

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

TraceEntry = Mapping[str, Any]
"""An entry of PyTorch's memory history: `action`, `addr` and `size`, and `frames` with a stack."""

Storages = dict[int, dict[int, int]]
"""Bytes of storages by device index and address."""

OomObserver = Callable[[int, int, int, int], None]
"""Called with the device index, the request rounded up to a segment, the process's memory limit (or
the device's total) and the driver's free memory, all in bytes."""


class WeakStorage(Protocol):
    """A weak reference to a storage."""

    def add(self, found: Storages) -> None:
        """Add the storage if it still exists."""


class TensorCounter(Protocol):
    """Finds the storages of the script's tensors on this backend's devices."""

    def count(self, values: Iterable[object], found: Storages) -> None:
        """Add the storages of tensors, and of tensors inside containers and objects."""

    def tensors(self, value: object) -> list[Any]:
        """Return the tensors in a tensor, container, or object."""

    def count_gradients(self, parameters: Iterable[Any], found: Storages) -> None:
        """Add the storages of the gradients that exist; for the thread that trains."""

    def have_gradients(self, parameters: Sequence[Any]) -> tuple[bool, ...]:
        """Return which parameters have a gradient; for the thread that trains."""

    def viewed_storages(self, parameters: Iterable[Any]) -> list[WeakStorage]:
        """Return the storages that gradients are views of; for the thread that trains."""


class Modules(Protocol):
    """Finds the script's modules."""

    @property
    def version(self) -> int:
        """A number that changes when a module registers a parameter or a submodule."""

    def roots(self) -> list[ref[Any]]:
        """Return modules from which all others can be reached as submodules."""

    def submodules(self, module: object) -> list[ref[Any]]:
        """Return the direct submodules of a module."""

    def named_submodules(self, module: object) -> list[tuple[str, ref[Any]]]:
        """Return the direct submodules of a module with their names."""

    def parameters(self, module: object) -> list[Any]:
        """Return the parameters of a module without those of its submodules."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device on which this process has a context: torch's index, NVML's UUID, name and bytes.

    `shares_host_memory`: it has no memory of its own, but uses the host's. `visible_devices`: how
    many devices the process sees (torch.cuda.device_count); None if unknown.
    """

    index: int
    uuid: str | None
    name: str | None
    total_bytes: int | None
    shares_host_memory: bool = False
    visible_devices: int | None = None


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block of `size` bytes on torch's device `device`, for the current stream by default."""

    device: int
    size: int
    stream: int | None = None


class Backend(Protocol):
    """What the SDK needs from an allocator. A subclass inherits that CUDA never starts.

    No method may create a context. Only the methods that are named for it may reset statistics,
    synchronize, record history or release memory.
    """

    def is_initialized(self) -> bool:
        """Return whether CUDA is initialized; all other methods are called only afterwards."""
        return False

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` when it cannot make another thread wait.

        For background threads. `call` reads this backend and never raises. It runs at most once:
        before this method returns, later, or never.
        """

    def devices(self) -> Sequence[Device]:
        """Return the devices on which this process has a context."""
        return ()

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the nested statistics of one device; None if this allocator keeps none."""
        return None

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return the segments and blocks of all devices, without traces.

        Return None if this is unsupported, or too expensive at the moment.
        """
        return None

    def free_bytes(self, device: int) -> int | None:
        """Return the bytes that the driver can still allocate on the device (cudaMemGetInfo).

        On a device that shares the host's memory, what the host has available.
        """
        return None

    def pinned_memory(self) -> PinnedMemory | None:
        """Return the bytes of pinned host memory; None if this allocator keeps no statistics."""
        return None

    def limit_bytes(self, device: int) -> int | None:
        """Return the limit that the process's memory fraction sets, in bytes.

        Without a memory fraction this is the device's total. Return None if it is unknown.
        """
        return None

    def world(self) -> tuple[int, int] | None:
        """Return the rank and the world size in torch.distributed; None without a process group."""
        return None

    def process_groups(self) -> Iterable[ProcessGroup]:
        """Return the process groups whose communicators use this backend's devices."""
        return ()

    def history_enabled(self) -> bool | None:
        """Return whether memory history is being recorded; None if this is unsupported."""
        return None

    def owns_history(self) -> bool:
        """Return whether the history is the SDK's, started by one of the methods below.

        It stops being the SDK's once the script starts its own history, or stops this one.
        """
        return False

    def start_history(self, max_entries: int) -> bool:
        """Record allocations with their Python stacks, the latest `max_entries` of each device.

        Return False if history is being recorded already.
        """
        return False

    def stop_history(self) -> None:
        """Stop the SDK's recording and discard what was recorded; do nothing if there is none."""

    def start_stacks(self) -> bool:
        """Record the Python stack of each live block, without a history of freed ones.

        Return False if history is being recorded already.
        """
        return False

    def start_trace(self, max_entries: int, *, complete: bool = False) -> bool:
        """Record allocations and frees without stacks, the latest `max_entries` of each device.

        With `complete`, also what a replay needs: requested frees, segments and OutOfMemoryErrors.
        Return False if this is unsupported, or if history is being recorded already.
        """
        return False

    def end_trace(self, use: Callable[[Sequence[Sequence[TraceEntry]]], T]) -> T | None:
        """Stop recording and return what `use` makes of each device's entries.

        Return None, and do not stop, if the script has begun to record in the meantime.
        """
        return None

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:
        """Return a snapshot for PyTorch's memory_viz, with or without the recorded history.

        Return None if this is unsupported.
        """
        return None

    def empty_cache(self) -> None:
        """Release cached segments to the driver, except during a graph capture.

        Called only with the setting `release`.
        """

    def hold(self, blocks: Sequence[HeldBlock]) -> AbstractContextManager[int]:
        """Allocate blocks, yield their bytes, and free the blocks at the end of the context.

        Stops at the first block that cannot be allocated, without calling OOM observers. Does
        nothing during a graph capture. PyTorch's peaks do not show the blocks: they are reset at
        both ends, so reset them before. Called only with the setting `release`.
        """
        return nullcontext(0)

    def is_capturing(self) -> bool:
        """Return whether this thread is capturing a CUDA graph."""
        return False

    def call_after_oom(self, call: Callable[[], None]) -> None:
        """Run `call` in the main thread once the OutOfMemoryError is raised there.

        For the OOM observer. Raises RuntimeError if that is impossible.
        """

    def raise_after(self, error: BaseException, code: CodeType) -> None:
        """Raise `error` in the main thread as soon as no frame of `code` runs there.

        For what interrupts a callback whose exceptions are ignored. Raises RuntimeError if that is
        impossible.
        """

    def reset_peaks(self, device: int) -> None:
        """Reset PyTorch's peak statistics; called only with the setting `reset_peaks`."""

    def backward_node(self) -> str | None:
        """Return the name of the autograd node whose backward runs in this thread, or None.

        The name is empty if this version of PyTorch does not report it.
        """
        return None

    def gradients_enabled(self) -> bool | None:
        """Return whether autograd records in this thread; None if unknown."""
        return None

    def current_stream(self, device: int) -> int | None:
        """Return the calling thread's stream as numbered in snapshots; None if unknown."""
        return None

    def allocator_settings(self) -> Mapping[str, str]:
        """Return the allocator settings in effect at the latest snapshot, by PyTorch's names."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and cuda, and the allocator backend."""
        return {}

    def on_init(self, callback: Callable[[], None]) -> None:
        """Run `callback` once when CUDA is initialized, or now if it already is."""

    def on_step(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """Run `callback` with the optimizer, in the training thread, after each of its steps.

        Return a function that removes it.
        """
        return lambda: None

    def on_step_begin(self, callback: Callable[[object, bool], None]) -> Callable[[], None]:
        """Run `callback` in the training thread before each optimizer step.

        It gets the optimizer, and whether the step is given a closure, which runs forward and
        backward passes. Return a function that removes it.
        """
        return lambda: None

    def tensor_counter(self) -> TensorCounter | None:
        """Return the finder of the script's tensors; None if this allocator has none."""
        return None

    def python_tensors(self, device: int) -> tuple[TensorGroup, ...] | None:
        """Return the tensors on a device that are Python objects; None if that is not known.

        May take 0.2 s.
        """
        return None

    def storage(self, value: object, device: int) -> tuple[int, int] | None:
        """Return the identity and the bytes of a tensor's storage on a device.

        None for all other objects. Runs no code of the script.
        """
        return None

    def untraced(self, function: C) -> C:
        """Return a function that interrupts the script anywhere such that no compiler sees it."""
        return function

    def modules(self) -> Modules | None:
        """Return the finder of the script's modules; None if there are none."""
        return None

    def on_oom(self, observer: OomObserver) -> None:
        """Attach `observer` for the life of the process.

        It runs before OutOfMemoryError is raised.
        """
