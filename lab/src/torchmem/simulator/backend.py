"""`SimulatedBackend`: simulated allocators behind the interface that the SDK reads PyTorch by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

from torchmem.allocator.backend import (
    Backend,
    Device,
    HeldBlock,
    OomObserver,
    Storages,
    TensorCounter,
    WeakStorage,
)
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block

Callback = Callable[[], None]


class SimulatedOptimizer:
    """What the SDK reads of an optimizer: its parameters, here blocks without gradients or states.

    Blocks that are added to the list later are parameters, too.
    """

    def __init__(self, parameters: list[Block]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[object, object] = {}


class _BlockCounter:
    """Counts blocks as tensors on device 0; they have no gradients."""

    def count(self, values: Iterable[object], found: Storages) -> None:
        for block in values:
            if isinstance(block, Block):
                found.setdefault(0, {})[block.address] = block.requested_size

    def tensors(self, value: object) -> list[Any]:
        return [value] if isinstance(value, Block) else []

    def count_gradients(self, parameters: Iterable[Any], found: Storages) -> None:
        pass

    def have_gradients(self, parameters: Sequence[Any]) -> tuple[bool, ...]:
        return (False,) * len(parameters)

    def viewed_storages(self, parameters: Iterable[Any]) -> list[WeakStorage]:  # noqa: ARG002
        return []


class SimulatedBackend(Backend):
    """One simulated allocator per device. A simulated process is alone and has no modules.

    The training loop calls `step()` where an optimizer step would end. With `initialized=False`,
    CUDA counts as not initialized until `init()` is called.
    """

    def __init__(
        self, allocators: Sequence[DeviceCachingAllocator], *, initialized: bool = True
    ) -> None:
        self._allocators = {allocator.device: allocator for allocator in allocators}
        self._initialized = initialized
        self._recording = False
        self._init_callbacks: list[Callback] = []
        self._step_callbacks: list[Callable[[object], None]] = []
        self._after_oom: list[Callback] = []

    def init(self) -> None:
        """Initialize CUDA: run the callbacks that wait for it."""
        self._initialized = True
        waiting, self._init_callbacks = self._init_callbacks, []
        for callback in waiting:
            callback()

    def step(self, optimizer: object = 0) -> None:
        """End one step of an optimizer: run the step callbacks in this thread."""
        waiting, self._after_oom = self._after_oom, []
        for call in waiting:
            call()
        for callback in list(self._step_callbacks):
            callback(optimizer)

    def is_initialized(self) -> bool:
        """Return whether CUDA counts as initialized."""
        return self._initialized

    def call_soon(self, call: Callback) -> None:
        """Run `call` at once: a simulated allocator never blocks."""
        call()

    def devices(self) -> Sequence[Device]:
        """Return the simulated GPUs."""
        return [
            Device(index, allocator.gpu.uuid, allocator.gpu.name, allocator.gpu.total_bytes)
            for index, allocator in self._allocators.items()
        ]

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the nested statistics of one device."""
        return self._allocators[device].memory_stats_as_nested_dict()

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return the segments and blocks of all devices."""
        return [
            segment
            for allocator in self._allocators.values()
            for segment in allocator.memory_snapshot()
        ]

    def free_bytes(self, device: int) -> int | None:
        """Return the free bytes of a simulated GPU."""
        return self._allocators[device].gpu.mem_get_info()[0]

    def limit_bytes(self, device: int) -> int | None:
        """Return the limit set by a memory fraction in bytes, or the total of the GPU."""
        allowed = self._allocators[device].allowed_memory_maximum
        return self._allocators[device].gpu.total_bytes if allowed is None else allowed

    def history_enabled(self) -> bool | None:
        """Return whether the history counts as recording."""
        return self._recording

    def owns_history(self) -> bool:
        """Return whether the history counts as recording; no script records its own."""
        return self._recording

    def start_history(self, max_entries: int) -> bool:  # noqa: ARG002
        """Mark the history as recording; simulated allocations leave no trace."""
        was_recording, self._recording = self._recording, True
        return not was_recording

    def stop_history(self) -> None:
        """Mark the history as off."""
        self._recording = False

    def start_stacks(self) -> bool:
        """Mark the history as recording; simulated allocations have no stack."""
        return self.start_history(1)

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return the segments, with an empty trace for each device."""
        return {
            "segments": self.memory_snapshot(),
            "device_traces": [[] for _ in self._allocators],
            "allocator_settings": dict(self.allocator_settings()),
        }

    def empty_cache(self) -> None:
        """Empty the cache of every device."""
        for allocator in self._allocators.values():
            allocator.empty_cache()

    @contextmanager
    def hold(self, blocks: Sequence[HeldBlock]) -> Iterator[int]:
        """Allocate blocks for a moment. Stop where the GPU has no memory for the next one."""
        held: list[tuple[DeviceCachingAllocator, Block]] = []
        for block in blocks:
            allocator = self._allocators[block.device]
            stream = allocator.current_stream if block.stream is None else block.stream
            # A request that the driver refuses would make the allocator give back its cache.
            if not allocator.would_reuse(block.size, stream) and (
                block.size > allocator.gpu.mem_get_info()[0]
            ):
                break
            held.append((allocator, allocator.malloc(block.size, stream)))
        for allocator in {allocator for allocator, _ in held}:
            allocator.reset_peak_memory_stats()
        try:
            yield sum(block.size for _, block in held)
        finally:
            for allocator, own in held:
                allocator.free(own)
                allocator.reset_peak_memory_stats()

    def call_after_oom(self, call: Callback) -> None:
        """Run `call` at the next step: the observer is still being called."""
        self._after_oom.append(call)

    def raise_after(self, error: BaseException, code: CodeType) -> None:  # noqa: ARG002
        """Raise `error` at the next step."""

        def raise_it() -> None:
            raise error

        self._after_oom.append(raise_it)

    def reset_peaks(self, device: int) -> None:
        """Reset the peaks of one device."""
        self._allocators[device].reset_peak_memory_stats()

    def gradients_enabled(self) -> bool:
        """Return True: every scenario trains."""
        return True

    def current_stream(self, device: int) -> int | None:
        """Return the stream of the latest request."""
        return self._allocators[device].current_stream

    def allocator_settings(self) -> Mapping[str, str]:
        """Return the settings of the first device's allocator."""
        config = next(iter(self._allocators.values())).config
        return {"backend": "native", "release_lock_on_cudamalloc": "False"} | config.settings()

    def versions(self) -> Mapping[str, str]:
        """Report `simulated` as the version of torch."""
        return {"torch": "simulated"}

    def on_init(self, callback: Callback) -> None:
        """Run `callback` once CUDA is initialized, or at once if it is."""
        if self._initialized:
            callback()
        else:
            self._init_callbacks.append(callback)

    def tensor_counter(self) -> TensorCounter:
        """Return what counts the blocks of `SimulatedOptimizer`."""
        return _BlockCounter()

    def on_step(self, callback: Callable[[object], None]) -> Callback:
        """Run `callback` at each `step()`; return a function that removes it, idempotently."""
        self._step_callbacks.append(callback)

        def remove() -> None:
            with suppress(ValueError):
                self._step_callbacks.remove(callback)

        return remove

    def on_oom(self, observer: OomObserver) -> None:
        """Attach `observer` to every device."""
        for allocator in self._allocators.values():
            allocator.attach_out_of_memory_observer(observer)
