"""Executes a long program with the compiled replay, with the results of `Executor.run`."""

from __future__ import annotations

import ctypes
from contextlib import closing

from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.simulator.compiled import (
    DONE,
    CompiledReplay,
    ProgramColumns,
    UnsupportedError,
    library,
)
from torchmem.whatif.executor import Executor
from torchmem.whatif.failed_request import Refusal, failed_request
from torchmem.whatif.program import Operation, Program
from torchmem.whatif.result import FailedRequest, ReplayResult, TimelinePoint

MIN_INSTRUCTIONS = 100_000
"""Python takes about half a second for them, and a compiler one second, once."""


def run_compiled(
    executor: Executor, program: Program, samples: int, least: int = MIN_INSTRUCTIONS
) -> ReplayResult | None:
    """Return what `executor.run(program)` and then `executor.result` would.

    The result has no name yet. None if the program has fewer than `least` instructions, if there is
    no compiled replay here, or if the program does what only `Executor` can; the executor is as
    before.
    """
    loaded = library() if len(program) >= least else None
    if loaded is None:
        return None
    try:
        with closing(_replay(loaded, executor, program, samples)) as replay:
            return _Run(executor, program, replay).result()
    except UnsupportedError:
        return None


def _replay(
    loaded: ctypes.CDLL, executor: Executor, program: Program, samples: int
) -> CompiledReplay:
    of_instruction, numbers = program.slots()
    columns = ProgramColumns(
        program.operations,
        program.numbers,
        of_instruction,
        program.sizes,
        program.streams,
        program.pools,
    )
    own = program.pool_ids
    pools = executor.allocator.memory.private_pools.graph_pools
    blocks = {
        numbers[address]: block for address, block in executor.blocks.items() if address in numbers
    }
    return CompiledReplay(
        loaded,
        executor.allocator,
        blocks,
        columns,
        [*own[1:], *(pool for pool in pools if pool not in own and pool != DEFAULT_POOL)],
        slots=len(numbers),
        events=executor.events,
        samples=samples,
    )


class _Run:
    def __init__(self, executor: Executor, program: Program, replay: CompiledReplay) -> None:
        self._executor = executor
        self._program = program
        self._replay = replay
        self._oom: FailedRequest | None = None

    def result(self) -> ReplayResult:
        """Run to the end."""
        replay, executor = self._replay, self._executor
        replayed = executor.events
        while replay.run() != DONE:
            number = self._program.numbers[replay.failed]
            replay.sample(number)
            self._oom = self._oom or self._failure(number)
            if self._program.operations[replay.failed] == Operation.MALLOC:
                replayed = number
                break
            replay.go_on(number)
        replay.sample(replayed)
        executor.on_sample(replayed)
        return self._counted(replayed)

    def _failure(self, number: int) -> FailedRequest:
        allocator, counts, place = (
            self._executor.allocator,
            self._replay.counts,
            self._replay.failed,
        )
        refusal = Refusal(
            allocator.device,
            counts.requested,
            counts.free_bytes,
            allocator.allowed_memory_maximum,
            self._executor.limit,
            counts.reserved,
            counts.allocated,
            allocator.config.large_segment_size,
        )
        size, stream = self._program.sizes[place], self._program.streams[place]
        return failed_request(number, size, stream, refusal, self._replay.memory_snapshot())

    def _counted(self, replayed: int) -> ReplayResult:
        counts = self._replay.counts
        return ReplayResult(
            name="",
            conf="",
            peak_reserved=counts.peak_reserved,
            peak_allocated=counts.peak_allocated,
            worst_stranded=counts.worst_stranded,
            worst_event=None if counts.worst_event < 0 else counts.worst_event,
            retries=counts.retries,
            ooms=counts.ooms,
            oom=self._oom,
            replayed_events=replayed,
            device_allocs=counts.device_allocs,
            device_frees=counts.device_frees,
            syncs=counts.syncs,
            timeline=tuple(TimelinePoint(*point) for point in self._replay.timeline()),
        )
