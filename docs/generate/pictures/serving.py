"""Inference engines in virtual time, awake and asleep in turns, with the SDK's own part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from docs.generate.pictures.training import GIB, Life, Trainer

from torchmem.integrations.vllm_terms import VLLM
from torchmem.sample.sample import ASLEEP, DeviceSample
from torchmem.sdk.draft import Draft
from torchmem.sdk.engine import EngineAllocation, EnginePart, EnginePlan
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.scenario import ScenarioEvent

MIB = 1 << 20
POOL = (0, 7)
"""The pool of vLLM's allocator (`use_memory_pool` of vllm/device_allocator/cumem.py)."""
GRAPH_POOL = (0, 8)
LAYERS = 32
WEIGHTS, KV_CACHE, GRAPHS, ACTIVATIONS = 15 * GIB, 38 * GIB, 900 * MIB, 5 * GIB
"""Of an engine of 8 billion parameters that was given three quarters of 80 GiB."""
FREE_IN_GRAPHS = 220 * MIB
"""What only the graphs can use again."""
LARGEST_BATCH = 0.6
"""The share of the planned activations that requests need."""
LEFT_AT_EACH_SLEEP = 24 * MIB
"""A buffer that each update of the weights leaves behind."""
CYCLE_SECONDS, AWAKE_SECONDS = 600.0, 390.0


@dataclass(frozen=True, slots=True)
class EngineLife(Life):
    """A process that serves the model `run`: awake, then asleep, in each cycle.

    With `leaks`, each sleep leaves more on the GPU than the one before.
    """

    leaks: bool = False


class SimulatedEngine:
    """What the engine holds: weights and KV cache in a pool that sleeps, and CUDA graphs."""

    name = "vllm"
    terms = VLLM
    is_alone = True
    device = 0

    def __init__(self, allocator: DeviceCachingAllocator) -> None:
        self._allocator = allocator
        self.is_asleep = False
        allocator.create_or_incref_pool(POOL)
        allocator.begin_allocate_to_pool(POOL)
        self._blocks = {
            "weights": [allocator.malloc(WEIGHTS // LAYERS) for _ in range(LAYERS)],
            "kv_cache": [allocator.malloc(KV_CACHE // LAYERS) for _ in range(LAYERS)],
        }
        allocator.end_allocate_to_pool(POOL)
        allocator.create_or_incref_pool(GRAPH_POOL)
        allocator.begin_allocate_to_pool(GRAPH_POOL)
        self._graphs = allocator.malloc(GRAPHS)
        allocator.free(allocator.malloc(FREE_IN_GRAPHS))
        allocator.end_allocate_to_pool(GRAPH_POOL)

    def allocations(self) -> Iterable[EngineAllocation]:
        """Return what sleeps, by vLLM's tags."""
        return [
            EngineAllocation(block.address, block.requested_size, part, self.is_asleep)
            for part, blocks in self._blocks.items()
            for block in blocks
        ]

    def parts(self) -> Mapping[str, int]:
        """Return the graphs; the pool has the rest."""
        return {"cudagraph": self._graphs.requested_size}

    def plan(self) -> EnginePlan:
        """Return the plan, in which the activations are those of the largest batch."""
        parts = {
            "weights": WEIGHTS,
            "activations": ACTIVATIONS,
            "cudagraph": GRAPHS,
            "kv_cache": KV_CACHE,
            "other": 600 * MIB,
        }
        return EnginePlan(parts, sum(parts.values()), WEIGHTS + parts["other"])

    @property
    def sleeping_bytes(self) -> int:
        """What falls asleep."""
        return sum(block.requested_size for blocks in self._blocks.values() for block in blocks)


class Server(Trainer):
    """Plays the life of an engine's process: batches while it is awake, and nothing else asleep."""

    life: EngineLife

    def __init__(self, life: EngineLife, gpu: SimulatedGpu, local_rank: int) -> None:
        super().__init__(life, gpu, local_rank)
        self._engine = SimulatedEngine(self.allocator)
        self._part = EnginePart(
            self._recorder, lambda: self._steps, self.allocator.reset_peak_memory_stats
        )
        self._part.source = self._engine
        self._changed()
        self._part.ready()
        self._preemptions = 0

    def own_page(self) -> Mapping[str, float]:
        """Return vLLM's own metrics; only the first rank serves HTTP."""
        if not self.is_live or self.life.rank:
            return {}
        return {
            "vllm:kv_cache_usage_perc": self._load() if not self._engine.is_asleep else 0.0,
            "vllm:num_preemptions_total": float(self._preemptions),
        }

    def _train(self) -> Iterator[ScenarioEvent]:
        kept: list[Block] = []
        while True:
            if self._is_awake() == self._engine.is_asleep:
                self._move(kept)
            if self._engine.is_asleep:
                yield "compute"
            else:
                yield from self._batch()

    def _batch(self) -> Iterator[ScenarioEvent]:
        size = int(ACTIVATIONS * LARGEST_BATCH * self._load() * self._chance.uniform(0.4, 1.0))
        block = self.allocator.malloc(max(size, MIB))
        yield "compute"
        self.allocator.free(block)
        self._preemptions += self._load() > 0.93 and self._chance.random() < 0.3
        yield "step"

    def _load(self) -> float:
        """Return the share of the KV cache that requests use: a tide, with a crest at the top."""
        tide = math.sin((self.played - self.life.start) / 900 + self.life.rank)
        return 0.6 + 0.38 * tide

    def _is_awake(self) -> bool:
        return (self.played - self.life.start) % CYCLE_SECONDS < AWAKE_SECONDS

    def _move(self, kept: list[Block]) -> None:
        """Give to the driver what sleeps, or take it again, and have the SDK read what is there.

        `kept` is what was never freed; a leak adds to it.
        """
        size = self._engine.sleeping_bytes
        if self._engine.is_asleep:
            if not self.gpu.use.claim(size, self.gpu.total_bytes):
                return
        else:
            self.allocator.empty_cache()
            if self.life.leaks:
                kept.append(self.allocator.malloc(LEFT_AT_EACH_SLEEP))
            self.gpu.use.release(size)
        self._engine.is_asleep = not self._engine.is_asleep
        self._last_step = self.played
        self._changed()
        if self._engine.is_asleep:
            self._part.slept()

    def _changed(self) -> None:
        self._part.changed()
        self._read_stats()

    def _complete(self, draft: Draft) -> None:
        super()._complete(draft)
        self._part.complete(draft)

    def _components(self, device: DeviceSample) -> dict[str, int]:
        """Return the parts of the engine, and what else is allocated."""
        if device.allocator is None:
            return {}
        allocated = device.allocator.allocated_bytes.total
        if self._engine.is_asleep:
            parts = {"weights": 0, "kv_cache": 0, ASLEEP: self._engine.sleeping_bytes}
        else:
            parts = {"weights": WEIGHTS, "kv_cache": KV_CACHE}
        return parts | {"held": allocated - sum(parts.values())}

    def _phase_peaks(self, peak: int) -> dict[str, int]:
        return {"generate": peak}
