"""The compiled replay does what the Python modules do, which are the reference."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from support.allocator_programs import SETTINGS, Setting
from support.needs import no_compiler

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB
from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.simulator import compiled
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import BlockOrder
from torchmem.whatif.compiled_replay import run_compiled
from torchmem.whatif.executor import SAMPLES, Executor, ReplayEndedError
from torchmem.whatif.program import Instruction, Operation, Program
from torchmem.whatif.replay import NewGpu
from torchmem.whatif.result import ReplayResult

OPERATIONS = 800
POOLS = ((0, 1), (0, 2))
SIZES = (4096, MIB, MIB, 4 * MIB, 10 * MIB, 24 * MIB)

needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason=no_compiler() or "")


def executor(setting: Setting, order: BlockOrder, events: int, conf: str | None = None) -> Executor:
    """Return an executor on a new GPU."""
    gpu = NewGpu(setting.gpu, context_bytes=0)
    config = AllocatorConfig.parse(setting.conf if conf is None else conf)
    allocator = DeviceCachingAllocator(gpu, config=config, order=order)
    if setting.fraction < 1:
        allocator.set_memory_fraction(setting.fraction)
    made = Executor(allocator, setting.gpu, events)
    made.use_pools(POOLS if setting.pools else ())
    return made


class Programmer:
    """Writes a random program; what does not fit under its setting is a request that fails."""

    def __init__(self, setting: Setting, order: BlockOrder, seed: int) -> None:
        self._setting, self._chance = setting, Random(seed)
        self._executor = executor(setting, order, 1 << 40)
        self._live: list[Instruction] = []
        self._waiting: list[Instruction] = []
        self._released: set[tuple[int, int]] = set()
        self._number, self._growth = 0, 0.6

    def program(self, length: int) -> Program:
        """Return the next instructions."""
        program = Program()
        for _ in range(length):
            self._number += 1
            instruction = self._next()
            try:
                self._executor.execute(instruction)
            except ReplayEndedError:
                instruction = (Operation.TRY_MALLOC, *instruction[1:])
                self._growth = self._chance.uniform(0.3, 0.5)
            if instruction[0] == Operation.MALLOC:
                self._live.append(instruction)
            program.append(instruction)
        return program

    def _next(self) -> Instruction:
        chance, roll = self._chance, self._chance.random()
        if chance.random() < 0.01:
            self._growth = chance.uniform(0.45, 0.7)
        if roll < 0.01:
            return (Operation.EMPTY_CACHE, self._number, 0, 0, 0, DEFAULT_POOL)
        if roll < 0.02 and self._setting.pools:
            return self._pool_operation()
        if self._waiting and roll < 0.1:
            return self._on(Operation.COMPLETE, self._waiting)
        if self._live and chance.random() > self._growth:
            if chance.random() < 0.8:
                return self._on(Operation.FREE, self._live)
            freed = self._on(Operation.FREE_LATER, self._live)
            self._waiting.append(freed)
            return freed
        pools = [DEFAULT_POOL]
        if self._setting.pools:
            pools += [pool for pool in POOLS if pool not in self._released]
        stream = chance.randrange(self._setting.streams)
        size = min(self._setting.largest, chance.randint(1, chance.choice(SIZES)))
        return (Operation.MALLOC, self._number, self._number, size, stream, chance.choice(pools))

    def _on(self, operation: Operation, blocks: list[Instruction]) -> Instruction:
        _, _, address, size, stream, pool = blocks.pop(self._chance.randrange(len(blocks)))
        return (operation, self._number, address, size, stream, pool)

    def _pool_operation(self) -> Instruction:
        pool = self._chance.choice(POOLS)
        if pool in self._released:
            return (Operation.EMPTY_POOL, self._number, 0, 0, 0, pool)
        if self._number < OPERATIONS:
            return (Operation.EMPTY_CACHE, self._number, 0, 0, 0, DEFAULT_POOL)
        self._released.add(pool)
        return (Operation.RELEASE_POOL, self._number, 0, 0, 0, pool)


def both(made: Executor, program: Program) -> tuple[ReplayResult | None, ReplayResult]:
    """Return the results of the compiled replay and of the reference, from the same state."""
    made.oom = None
    made.start_counting()
    fast = run_compiled(made, program, SAMPLES, least=0)
    replayed = made.run(program)
    slow = made.result("", "", "recorded", replayed)
    return fast, slow


@needs_compiler
@pytest.mark.parametrize("order", ["segment", "block", "address"])
@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_equal(name: str, order: BlockOrder) -> None:
    """Timelines, counts and failed requests are equal under every setting, from any state."""
    setting = replace(SETTINGS[name], gpu=SETTINGS[name].gpu // 4, largest=40 * MIB)
    programmer = Programmer(setting, order, seed=len(name))
    first, second = programmer.program(OPERATIONS), programmer.program(OPERATIONS)
    made = executor(setting, order, 2 * OPERATIONS)
    for program in (first, second):
        fast, slow = both(made, program)
        assert fast == slow


@needs_compiler
@pytest.mark.parametrize("conf", sorted({setting.conf for setting in SETTINGS.values()}))
def test_other_settings_end_at_the_same_request(conf: str) -> None:
    """A program that another setting lets run out of memory ends with the same failed request."""
    setting = Setting(gpu=200 * MIB, streams=2, pools=True, largest=30 * MIB)
    program = Programmer(setting, "segment", seed=len(conf)).program(OPERATIONS)
    made = executor(setting, "segment", OPERATIONS, conf)
    fast, slow = both(made, program)
    assert fast == slow


@needs_compiler
def test_the_programs_are_worth_comparing() -> None:
    """They retry, fail and wait often, and occur with and without a limit."""
    seen = Counter[str]()
    for name in ("default", "expandable", "garbage_collection", "max_split", "pools"):
        setting = replace(SETTINGS[name], gpu=SETTINGS[name].gpu // 4, largest=40 * MIB)
        program = Programmer(setting, "segment", seed=len(name)).program(2 * OPERATIONS)
        made = executor(setting, "segment", 2 * OPERATIONS)
        _, slow = both(made, program)
        seen.update(retries=slow.retries, ooms=slow.ooms, frees=slow.device_frees)
        seen.update(Counter(Operation(operation).name for operation in program.operations))
    assert seen["retries"] > 50
    assert seen["ooms"] > 20
    assert seen["frees"] > 200
    assert min(seen[operation.name] for operation in Operation if operation.value < 6) > 20


@needs_compiler
def test_a_block_that_two_addresses_refer_to() -> None:
    """A block that a cache release freed early, and that was reused, is freed by its new user."""
    steps = (
        (Operation.MALLOC, 1, 2 * MIB),
        (Operation.MALLOC, 2, 2 * MIB),
        (Operation.FREE_LATER, 1, 0),
        (Operation.EMPTY_CACHE, 0, 0),
        (Operation.MALLOC, 3, 2 * MIB),
        (Operation.COMPLETE, 1, 0),
        (Operation.FREE, 3, 0),
        (Operation.MALLOC, 4, 18 * MIB),
    )
    first, second = Program(), Program()
    for number, (operation, address, size) in enumerate(steps):
        program = first if number < 5 else second
        program.append((operation, number, address, size, 0, DEFAULT_POOL))
    made = executor(Setting(gpu=GIB), "segment", len(steps))
    made.run(first)
    assert made.blocks[1] is made.blocks[3]
    fast, slow = both(made, second)
    assert fast == slow


@needs_compiler
def test_what_only_python_can_do_is_left_to_it() -> None:
    """A request to a pool that is gone is refused, as the reference raises for it."""
    program, pool = Program(), POOLS[0]
    for operation in (Operation.RELEASE_POOL, Operation.EMPTY_POOL, Operation.MALLOC):
        program.append((operation, 0, 1, 512, 0, pool))
    made = executor(Setting(gpu=GIB, pools=True), "segment", 3)
    assert run_compiled(made, program, SAMPLES, least=0) is None


def test_python_is_used_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHMEM_SIMULATOR=python, or a machine without a compiler, replays in Python."""
    compiled.library.cache_clear()
    monkeypatch.setenv(compiled.VARIABLE, "python")
    assert compiled.library() is None
    compiled.library.cache_clear()


OUT_OF_MEMORY = """
import resource
from torchmem.allocator.sizes import GIB
from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.simulator import compiled
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.device_memory import SimulatedGpu
from torchmem.whatif.compiled_replay import run_compiled
from torchmem.whatif.executor import SAMPLES, Executor
from torchmem.whatif.program import Operation, Program

program = Program()
for number in range(600_000):
    program.append((Operation.MALLOC, number, number, 512, 0, DEFAULT_POOL))
gpu = SimulatedGpu(64 * GIB, context_bytes=0)
executor = Executor(DeviceCachingAllocator(gpu), gpu, len(program.numbers))
compiled.library()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {room} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    run_compiled(executor, program, SAMPLES)
except MemoryError:
    print("MemoryError")
"""


@needs_compiler
@pytest.mark.parametrize("room", [56, 64, 72])
def test_memory_that_runs_out_is_a_memory_error(room: int) -> None:
    """Wherever host memory runs out in the compiled replay, Python gets its exception."""
    script = OUT_OF_MEMORY.replace("{room}", str(room))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "MemoryError\n", "")
