"""Replays a program, which is what a recorded run did, on a simulated allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.whatif.executor import Executor, ReplayEndedError
from torchmem.whatif.inference import Inference
from torchmem.whatif.parallel import in_processes
from torchmem.whatif.program import Operation, Program
from torchmem.whatif.result import ReplayResult, Start

T = TypeVar("T")

MIN_INSTRUCTIONS = 100_000
"""Half a second of replay: shorter programs are not worth a process each."""
UNLIMITED_BYTES = 1 << 40
"""More than any GPU has; the memory of a GPU of unknown size."""


class NewGpu(SimulatedGpu):
    """A GPU whose addresses are above all that a recording may have."""

    first_address = 1 << 47  # user addresses of Linux end here


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays the program of a recorded run under any setting.

    `gpu_bytes` is what the allocator can get; None for an unlimited GPU. `total_bytes` is all
    memory of the GPU, which a memory fraction refers to; if None, it equals `gpu_bytes`.
    """

    program: Program
    inference: Inference
    events: int
    gpu_bytes: int | None
    total_bytes: int | None
    on_sample: Callable[[int], None]

    def replay(self, name: str, conf: str, config: AllocatorConfig) -> ReplayResult:
        """Return what the program would have done, starting from the packed live blocks."""
        executor = self._executor(config)
        start: Start = "packed" if self.inference.before.segments else "empty"
        try:
            self._pack(executor)
        except ReplayEndedError:
            return executor.result(name, conf, start, 0)
        return self._run(executor, name, conf, start)

    def all(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        """Yield the results of calls that replay this program, in parallel if that saves time."""
        if len(self.program) >= MIN_INSTRUCTIONS:
            return in_processes(calls)
        return (call() for call in calls)

    def switch(self, name: str, conf: str, config: AllocatorConfig) -> ReplayResult:
        """Return what the program would have done, had the setting been switched at its start.

        Raises:
            ValueError: the GPU has too little memory for what was reserved then.
        """
        executor, before = self._executor(config), self.inference.before
        blocks = executor.allocator.restore(
            before.segments, before.first_addresses, self.inference.oldest_first
        )
        executor.blocks.update(blocks)
        return self._run(executor, name, conf, "switched")

    def _run(self, executor: Executor, name: str, conf: str, start: Start) -> ReplayResult:
        executor.start_counting()
        replayed = executor.run(self.program)
        return executor.result(name, conf, start, replayed)

    def _executor(self, config: AllocatorConfig) -> Executor:
        allocator = self._allocator(config)
        executor = Executor(allocator, self.gpu_bytes, self.events, on_sample=self.on_sample)
        segments = self.inference.before.segments
        pools = set(self.program.pool_ids) | {segment["segment_pool_id"] for segment in segments}
        executor.use_pools(sorted(pools - {DEFAULT_POOL}))
        return executor

    def _allocator(self, config: AllocatorConfig) -> DeviceCachingAllocator:
        obtainable = self.gpu_bytes or UNLIMITED_BYTES
        total = max(obtainable, self.total_bytes or 0) if self.gpu_bytes else obtainable
        gpu = NewGpu(total, context_bytes=total - obtainable)
        allocator = DeviceCachingAllocator(gpu, config=config, order=self.inference.order)
        fraction = config.per_process_memory_fraction
        if fraction < 1:
            allocator.set_memory_limit(int(fraction * total))
        elif config.garbage_collection_threshold:
            # The garbage collection needs a limit: use all that the allocator can get.
            allocator.set_memory_limit(self.gpu_bytes)
        return allocator

    def _pack(self, executor: Executor) -> None:
        """Request the initial live blocks in the order of their addresses.

        Raises:
            ReplayEndedError: they do not fit on the GPU.
        """
        for segment in self.inference.before.segments:
            pool, stream = segment["segment_pool_id"], segment["stream"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    continue
                place = block["address"], block["requested_size"], stream, pool
                executor.execute((Operation.MALLOC, 0, *place))
                if block["state"] != "active_allocated":
                    executor.execute((Operation.FREE_LATER, 0, *place))
