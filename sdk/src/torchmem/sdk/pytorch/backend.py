"""PyTorch's CUDA caching allocator as a `Backend`: the only file of the SDK that imports torch.

The SDK imports this module lazily and gates every call on `is_initialized`; no call creates a
context. For PyTorch 2.1 and newer: functions that a version lacks are looked up, and their values
are absent there. What depends most on the version is in files that take the torch module as an
argument: `allocator_reader.py`, `device_uuid.py`, `dynamo.py`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any, cast

import torch
from torch.cuda._utils import _get_device_index
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchmem.allocator.backend import C, Device, HeldBlock, OomObserver, T, TraceEntry
from torchmem.allocator.snapshot import NestedStats, SegmentInfo, without_collector
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.sample.native_threads import is_main_thread
from torchmem.sample.sample import PinnedMemory
from torchmem.sdk.pytorch.all_tensors import TensorWalk
from torchmem.sdk.pytorch.allocator_reader import AllocatorReader
from torchmem.sdk.pytorch.call_stack import backward_node
from torchmem.sdk.pytorch.device_memory import FreeMemory
from torchmem.sdk.pytorch.device_uuid import describe_device
from torchmem.sdk.pytorch.dynamo import untraced
from torchmem.sdk.pytorch.graph_captures import Captures
from torchmem.sdk.pytorch.process_groups import TorchProcessGroup, process_groups
from torchmem.sdk.pytorch.seen_modules import SeenModules
from torchmem.sdk.pytorch.storages import TensorReader
from torchmem.sdk.pytorch.user_peaks import FlatMemoryModule, MemoryModule, UserPeaks
from torchmem.sdk.safety.interruptions import ignore, is_interruption, shield
from torchmem.sdk.safety.main_thread import PendingCalls

# Events of PyTorch's history that say nothing about how much is requested.
SKIPPED_ACTIONS = ["free_requested", "segment_alloc", "segment_free", "oom", "snapshot"]

# Tuples, which are replaced and not changed, so that a hook need not copy them.
_step_callbacks: tuple[Callable[[object], None], ...] = ()
_step_begin_callbacks: tuple[Callable[[object, bool], None], ...] = ()


def _call_step_callbacks(optimizer: object, _arguments: object, _keywords: object) -> None:
    """Call the callbacks, shielded as by `shield` but without its frame: each step comes here."""
    try:
        for callback in _step_callbacks:
            callback(optimizer)
    except RecursionError as error:
        try:
            is_raised = is_interruption(error)
        except RecursionError:
            is_raised = False
        if is_raised:
            raise


def _call_step_begin_callbacks(
    optimizer: object, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> None:
    if _step_begin_callbacks:
        _announce_step(optimizer, arguments, keywords)


@shield
def _announce_step(
    optimizer: object, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> None:
    has_closure = any(map(callable, (*arguments, *keywords.values())))
    for callback in _step_begin_callbacks:
        callback(optimizer, has_closure)


def _without(callbacks: tuple[T, ...], removed: T) -> tuple[T, ...]:
    """Return the callbacks without the first that equals `removed`."""
    if removed not in callbacks:
        return callbacks
    index = callbacks.index(removed)
    return callbacks[:index] + callbacks[index + 1 :]


def _has_peaks(module: object) -> bool:
    return hasattr(module, "memory_stats") and hasattr(module, "reset_peak_memory_stats")


_modules = SeenModules(torch.nn.Module)
_captures = Captures()
_captures.follow(torch.cuda.CUDAGraph)


@shield
def _see_module(module: object, name: str, member: object) -> None:  # noqa: ARG001 - PyTorch's
    try:
        _modules.see(module)
    except Exception as error:
        if is_interruption(error):
            raise


# Never removed: PyTorch iterates over its hooks, and removing one meanwhile breaks the step.
register_optimizer_step_pre_hook(_call_step_begin_callbacks)
register_optimizer_step_post_hook(_call_step_callbacks)
register_module_parameter_registration_hook(_see_module)
register_module_module_registration_hook(_see_module)


class TorchBackend:
    """PyTorch's own allocator on every device where this process has a context."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._user_peaks: UserPeaks | None = None
        self._reader = AllocatorReader(torch, os.environ)
        self._free = FreeMemory(torch)
        self._walk = TensorWalk(torch)
        self._observer_code: CodeType | None = None
        self._pending = PendingCalls(partial(untraced, torch))
        self._holding_thread: int | None = None

    def is_initialized(self) -> bool:
        """Return `torch.cuda.is_initialized()`, a Python flag that is False in forked children."""
        return bool(torch.cuda.is_initialized())

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the main thread between two bytecodes.

        There the thread is not in the driver and does not hold the allocator's mutex.
        """
        self._pending.add(call)

    def devices(self) -> Sequence[Device]:
        """Return devices with a context of this process (`torch._C._cuda_hasPrimaryContext`)."""
        has_context = torch._C._cuda_hasPrimaryContext  # noqa: SLF001
        present = [index for index in range(torch.cuda.device_count()) if has_context(index)]
        for index in present:
            if index not in self._devices:
                self._devices[index] = describe_device(torch, index, os.environ)
        return [self._devices[index] for index in present]

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the nested statistics that this backend keeps.

        The nested form costs an eighth of the flattened one.
        """
        if self._reader.backend() == "pluggable":
            return None
        read = (
            self._user_peaks.stats if self._user_peaks else torch.cuda.memory_stats_as_nested_dict
        )
        return self._reader.kept_stats(read(device))

    def script_stats(self, device: int) -> NestedStats | None:
        """Return `memory_stats` with the peaks that the script sees, whatever `reset_peaks` did."""
        return self._reader.kept_stats(torch.cuda.memory_stats_as_nested_dict(device))

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return all segments without traces.

        None if the allocator is not native, or if history is being recorded and this version of
        PyTorch cannot leave it out.
        """
        return self._reader.segments()

    def free_bytes(self, device: int) -> int | None:
        """Return the first value of `torch.cuda.mem_get_info` (cudaMemGetInfo), if it can be true.

        On a device that shares the host's memory, what the host has available.
        """
        total, is_shared = self._memory_of(device)
        return self._free.read(device, total, is_shared=is_shared)

    def _memory_of(self, device: int) -> tuple[int, bool]:
        """Return the bytes of a device, and whether they are the host's."""
        known = self._devices.get(device)
        if known is None or known.total_bytes is None:
            return sys.maxsize, False
        return known.total_bytes, known.shares_host_memory

    def pinned_memory(self) -> PinnedMemory | None:
        """Return `torch._C._cuda_hostMemoryStats()` (since 2.7); it makes no CUDA call.

        Up to 2.8 it names the bytes in use `allocated_bytes` and all bytes `reserved_bytes`.
        """
        read = getattr(torch._C, "_cuda_hostMemoryStats", None)  # noqa: SLF001
        if read is None:
            return None
        stats = read()
        names = ("active_bytes", "allocated_bytes")
        if "reserved_bytes" in stats:
            names = ("allocated_bytes", "reserved_bytes")
        used, total = (int(stats[name]["current"]) for name in names)
        return PinnedMemory(used, max(0, total - used))

    def limit_bytes(self, device: int) -> int | None:
        """Return the user's memory fraction (known since 2.6) of the device's total."""
        fraction, total = self._reader.fraction(device), self._devices[device].total_bytes
        return None if fraction is None or total is None else int(min(fraction, 1.0) * total)

    def world(self) -> tuple[int, int] | None:
        """Return the rank and the size of the default process group, which the script creates."""
        distributed = torch.distributed
        # Between the two calls another thread may destroy the group.
        with ignore(ValueError, RuntimeError):
            if distributed.is_available() and distributed.is_initialized():
                return distributed.get_rank(), distributed.get_world_size()
        return None

    def process_groups(self) -> Iterator[TorchProcessGroup]:
        """Return the groups that NCCL or RCCL serves."""
        if self.world() is None:
            return iter(())
        devices = self.devices()
        return process_groups(torch, devices[0].index if len(devices) == 1 else None)

    def history_enabled(self) -> bool | None:
        """Return whether history is recorded; only the native allocator can record it."""
        return self._reader.history_enabled() if self._reader.backend() == "native" else None

    def owns_history(self) -> bool:
        """Return whether one of the methods below has started what is recorded."""
        return self._reader.recording.kind is not None

    def start_history(self, max_entries: int) -> bool:
        """Record allocations with Python stacks; resolving C++ frames would take minutes."""
        return self._reader.recording.start(
            "history", enabled="all", context="alloc", max_entries=max_entries
        )

    def stop_history(self) -> None:
        """Stop recording and clear PyTorch's buffer, unless the script records."""
        self._reader.recording.stop(("history", "stacks"), lambda: None)

    def start_stacks(self) -> bool:
        """Record with `enabled="state"` (since 2.1), which keeps the stacks of live blocks only.

        The first snapshot with stacks imports torch._inductor, which torch.optim has mostly done
        (2.13, `py_symbolize`). Importing it here keeps that second out of the snapshots' account.
        """
        # The module's `__getattr__` imports it (torch/__init__.py).
        getattr(torch, "_inductor", None)
        return self._reader.recording.start(
            "stacks", enabled="state", context="state", max_entries=1
        )

    def start_trace(self, max_entries: int, *, complete: bool = False) -> bool:
        """Record allocations and completed frees without stacks, or all entries, since 2.11."""
        reader = self._reader
        if reader.backend() != "native" or not reader.can_skip_traces:
            return False
        return reader.recording.start(
            "trace",
            enabled="all",
            context=None,
            max_entries=max_entries,
            clear_history=True,
            skip_actions=[] if complete else SKIPPED_ACTIONS,
        )

    def end_trace(self, use: Callable[[Sequence[Sequence[TraceEntry]]], T]) -> T | None:
        """Stop recording and return what `use` makes of the entries, unless the script records."""
        with without_collector():
            traces = self._reader.recording.stop(("trace",), self._reader.traces)
            try:
                return None if traces is None else use(traces)
            finally:
                traces = None

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:
        """Return `torch.cuda.memory._snapshot()`; without traces as `memory_snapshot` takes it."""
        if not traces:
            return self._reader.snapshot()
        if self._reader.backend() != "native":
            return None
        with without_collector():
            return cast("Mapping[str, Any]", torch.cuda.memory._snapshot())  # noqa: SLF001

    def empty_cache(self) -> None:
        """Empty the cache of all devices, except during the capture of a CUDA graph.

        A cudaFree would invalidate the capture.
        """
        if not self.is_capturing():
            torch.cuda.empty_cache()

    @contextmanager
    def hold(self, blocks: Sequence[HeldBlock]) -> Iterator[int]:
        """Hold blocks of `torch.cuda.caching_allocator_alloc`, as tensors hold theirs."""
        held: list[tuple[HeldBlock, int]] = []
        try:
            self._allocate([] if self.is_capturing() else blocks, held)
            yield sum(block.size for block, _ in held)
        finally:
            for _, address in held:
                torch.cuda.caching_allocator_delete(address)
            for device in {block.device for block, _ in held}:
                self._own_peaks().discard(device)

    def _allocate(self, blocks: Sequence[HeldBlock], held: list[tuple[HeldBlock, int]]) -> None:
        self._holding_thread = threading.get_ident()
        try:
            for block in blocks:
                address = torch.cuda.caching_allocator_alloc(block.size, block.device, block.stream)
                held.append((block, address))
        except torch.cuda.OutOfMemoryError:
            pass
        finally:
            self._holding_thread = None

    def is_capturing(self) -> bool:
        """Return whether this thread's stream, or any thread, is capturing a CUDA graph."""
        return _captures.are_under_way or bool(torch.cuda.is_current_stream_capturing())

    def call_after_oom(self, call: Callable[[], None]) -> None:
        """Run `call` in the main thread as soon as the observer's frames are gone there."""
        if self._observer_code is None:
            raise RuntimeError("no observer is attached")
        self._pending.call_after(call, self._observer_code)

    def raise_after(self, error: BaseException, code: CodeType) -> None:
        """Raise `error` in the main thread as soon as no frame of `code` runs there."""
        self._pending.raise_after(error, code)

    def reset_peaks(self, device: int) -> None:
        """Call `reset_peak_memory_stats`, hidden from the user's `max_memory_*` by `UserPeaks`."""
        self._own_peaks().reset(device)

    def _own_peaks(self) -> UserPeaks:
        if self._user_peaks is None:
            modules = cast("tuple[MemoryModule, ...]", (torch.cuda.memory, torch.cuda))
            accelerator = getattr(torch, "accelerator", None)
            flat = (getattr(accelerator, "memory", None), accelerator)
            self._user_peaks = UserPeaks(
                modules,
                lambda given: int(_get_device_index(given, optional=True)),
                cast("tuple[FlatMemoryModule, ...]", tuple(filter(_has_peaks, flat))),
            )
        return self._user_peaks

    def backward_node(self) -> str | None:
        """Return the name of the autograd node that runs in this thread, such as MmBackward0."""
        return backward_node(torch)

    def gradients_enabled(self) -> bool:
        """Return whether autograd records in this thread; in a backward pass it rarely does."""
        return bool(torch.is_grad_enabled())

    def current_stream(self, device: int) -> int | None:
        """Return the handle of the current stream, without a CUDA call."""
        return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001

    def allocator_settings(self) -> Mapping[str, str]:
        """Return what the allocator parsed, by the newest snapshot's settings (since 2.3)."""
        return self._reader.settings()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and of the CUDA or ROCm it was built for."""
        known = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": getattr(torch.version, "hip", None),
        }
        return {name: str(version) for name, version in known.items() if version}

    def on_init(self, callback: Callable[[], None]) -> None:
        """Run `callback` at the end of CUDA's initialization (`torch.cuda._lazy_call`).

        It runs at once if CUDA is up.
        """
        if hasattr(torch._C, "_cuda_init"):  # noqa: SLF001
            torch.cuda._lazy_call(callback)  # noqa: SLF001

    def tensor_counter(self) -> TensorReader:
        """Return what finds the storages of the script's tensors."""
        return TensorReader(torch)

    def python_tensors(self, device: int) -> tuple[TensorGroup, ...] | None:
        """Return the tensors among the objects that Python's collector tracks."""
        return self._walk.groups(device)

    def storage(self, value: object, device: int) -> tuple[int, int] | None:
        """Return the storage of a tensor of exactly PyTorch's own types."""
        return self._walk.storage(value, device)

    def untraced(self, function: C) -> C:
        """Keep TorchDynamo out of a function and of what it calls."""
        return untraced(torch, function)

    def modules(self) -> SeenModules:
        """Return the modules that have registered something since this module was imported."""
        return _modules

    def on_step_begin(self, callback: Callable[[object, bool], None]) -> Callable[[], None]:
        """Run `callback` before every step of an optimizer of torch.optim, by a global hook."""
        global _step_begin_callbacks  # noqa: PLW0603 - the hook belongs to the module
        _step_begin_callbacks += (callback,)

        def remove() -> None:
            global _step_begin_callbacks  # noqa: PLW0603
            _step_begin_callbacks = _without(_step_begin_callbacks, callback)

        return remove

    def on_step(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """Run `callback` after every step of an optimizer of torch.optim, by a global post hook.

        Optimizers that exist already are included.
        """
        global _step_callbacks  # noqa: PLW0603 - the hook belongs to the module
        _step_callbacks += (callback,)

        def remove() -> None:
            global _step_callbacks  # noqa: PLW0603
            _step_callbacks = _without(_step_callbacks, callback)

        return remove

    def on_oom(self, observer: OomObserver) -> None:
        """Attach `observer` for the life of the process.

        Only once CUDA is up: attaching it earlier would initialize the driver.
        """

        def observe(device: int, requested: int, limit: int, driver_free: int) -> None:
            # A request of `hold` failed, not one of the script.
            if self._holding_thread == threading.get_ident():
                return
            was_enabled = gc.isenabled()
            gc.disable()  # first of all: what a collection frees is to be seen as garbage
            try:
                total, is_shared = self._memory_of(device)
                free = self._free.possible(driver_free, total, is_shared=is_shared)
                observer(device, requested, limit, free)
            except BaseException as error:  # noqa: BLE001 - the observer counts its own errors
                self._raise_after_oom(error, callback.__code__)
            finally:
                if was_enabled:
                    gc.enable()

        callback = untraced(torch, shield(observe))
        self._observer_code = callback.__code__
        if self._reader.backend() == "native":
            torch._C._cuda_attach_out_of_memory_observer(callback)  # noqa: SLF001

    def _raise_after_oom(self, error: BaseException, callback: CodeType) -> None:
        """Have a signal handler's exception raised in the script after the OutOfMemoryError.

        An exception of the observer itself would replace that error. In other threads than the
        main one, where no signal handler runs, an asynchronous exception does replace it.
        """
        if not is_interruption(error):
            return
        if not is_main_thread():
            raise error
        try:
            self._pending.raise_after(error, callback)
        except RuntimeError:
            raise error from None
