"""Inference engines: what they hold awake and asleep, their plan, and what each sleep leaves.

The numbers are those of vLLM 0.33 on a GPU of 80 GB (tests/serving), with a model of two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from torchmem.sample.engine import Engine
from torchmem.sdk import EngineAllocation, EnginePlan
from torchmem.sdk.engine import MIN_STEPS, divided, kv_cache_advice
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import GpuUse, SimulatedGpu

MIB = 1 << 20
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]
WEIGHTS, LORA, RUNTIME, KV_CACHE = 454 * MIB, 72 * MIB, 80 * MIB, 73_316 * MIB
PLAN = EnginePlan({"activations": 734 * MIB}, budget=74_594 * MIB, consumed=546 * MIB)


def allocations(*asleep: str) -> list[EngineAllocation]:
    """Return what vLLM's allocator holds under its tags, with these asleep."""
    sizes = {"weights": WEIGHTS, "runtime": RUNTIME, "kv_cache": KV_CACHE}
    return [
        EngineAllocation(number << 40, size, part, part in asleep)
        for number, (part, size) in enumerate(sizes.items(), 1)
    ]


@dataclass
class FakeEngine:
    """An engine of which the test says what sleeps, in a process of its own."""

    name: str = "vllm"
    device: int = 0
    is_alone: bool = True
    held: Iterable[EngineAllocation] = field(default_factory=allocations)

    def allocations(self) -> Iterable[EngineAllocation]:
        return self.held

    def parts(self) -> Mapping[str, int]:
        return {"weights": WEIGHTS, "kv_cache": KV_CACHE, "lora": LORA}

    def plan(self) -> EnginePlan:
        return PLAN


class Server:
    """A server on a GPU of 80 GiB whose engine and neighbor the test moves."""

    def __init__(self, open_session: Opener, **settings: Any) -> None:
        self.gpu = SimulatedGpu(81_920 * MIB, context_bytes=0, use=GpuUse([0, 0]), uuid="GPU-1")
        self.allocator = DeviceCachingAllocator(self.gpu)
        self.backend = SimulatedBackend([self.allocator])
        self.session = open_session(self.backend, interval=1e-6, **settings)
        self.engine = FakeEngine()
        self.block = self.allocator.malloc(600 * MIB)
        self.backend.step()
        self.session.serve(self.engine)
        self.session.engine_changed()
        self.session.engine_ready()

    def move(self, *asleep: str, sleeps: bool = False) -> None:
        """Have the engine fall asleep or wake up."""
        with self.session.engine_moves(sleeps=sleeps):
            self.engine.held = allocations(*asleep)


def engine_in(published: Published) -> dict[str, Any]:
    """Return the engine in the newest sample."""
    engine: dict[str, Any] = published()[0]["devices"][0]["engine"]
    return engine


def test_lora_is_a_part_of_the_weights() -> None:
    """What vLLM holds under its tag weights is divided, awake and asleep."""
    parts = {"weights": 0, "lora": LORA, "kv_cache": 1}
    awake = {
        "weights": WEIGHTS - LORA,
        "runtime": RUNTIME,
        "kv_cache": KV_CACHE,
        "lora": LORA,
    }

    assert divided(allocations(), parts) == (awake, {})
    assert divided(allocations("weights", "runtime", "kv_cache"), parts) == ({}, awake)
    assert divided([], {"weights": 5, "kv_cache": 7}) == ({"weights": 5, "kv_cache": 7}, {})


def test_the_advice_gives_what_was_never_used() -> None:
    """It is vLLM's own suggestion with the actual peak of the activations, and a margin."""
    advice = kv_cache_advice(PLAN, {"activations": 11 * MIB})
    vllms = 74_594 * MIB - 546 * MIB - 734 * MIB - 150 * MIB

    assert advice == vllms + (734 - 11) * MIB - int(1.1 * MIB)


def test_the_advice_takes_what_requests_need_beyond_the_plan() -> None:
    """If requests need more than the profile run, the KV cache must be smaller."""
    vllms = 74_594 * MIB - 546 * MIB - 734 * MIB - 150 * MIB

    assert (kv_cache_advice(PLAN, {"activations": 2000 * MIB}) or 0) < vllms - 1200 * MIB
    assert kv_cache_advice(PLAN, {}) is None
    assert kv_cache_advice(EnginePlan({}), {"activations": 1}) is None
    assert kv_cache_advice(PLAN, {"activations": 80_000 * MIB}) is None


def test_a_sleep_is_published_at_once(open_session: Opener, published: Published) -> None:
    """No step and no bytecode of the process must follow; a wake-up in parts shows the rest."""
    server = Server(open_session)
    server.move("weights", "runtime", "kv_cache", sleeps=True)

    assert engine_in(published)["asleep"] == {
        "weights": WEIGHTS - LORA,
        "runtime": RUNTIME,
        "kv_cache": KV_CACHE,
        "lora": LORA,
    }
    assert engine_in(published)["resident"] == {}
    server.move("kv_cache")
    assert engine_in(published)["asleep"] == {"kv_cache": KV_CACHE}
    server.move()
    assert engine_in(published)["asleep"] == {}
    assert engine_in(published)["sleeps"] == 1


def test_a_failed_wake_up_is_published_and_counted(
    open_session: Opener, published: Published
) -> None:
    """The engine's exception passes, it counts as a library's OOM, and what woke up is shown."""
    server = Server(open_session)
    server.move("weights", "runtime", "kv_cache", sleeps=True)

    def wake_up() -> None:
        with server.session.engine_moves():
            server.engine.held = allocations("kv_cache")
            raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp")

    with pytest.raises(RuntimeError, match="CUDA Error"):
        wake_up()

    assert engine_in(published)["asleep"] == {"kv_cache": KV_CACHE}
    assert published()[0]["devices"][0]["counters"]["ooms"] == {"library": 1}


def test_peaks_count_from_ready_on(open_session: Opener, published: Published) -> None:
    """The warm-up's peak does not count; activations are what exceeds the bytes at rest."""
    server = Server(open_session)
    for _ in range(MIN_STEPS):
        server.backend.step()
    server.allocator.free(server.allocator.malloc(40 * MIB))
    server.backend.step()
    server.session.engine_changed()

    assert engine_in(published)["peaks"]["activations"] == 40 * MIB
    assert engine_in(published)["kv_cache_advice_bytes"] == kv_cache_advice(
        PLAN, {"activations": 40 * MIB}
    )


def test_what_each_sleep_leaves(open_session: Opener, published: Published) -> None:
    """It grows if every sleep leaves more than the one before, and not if one does not."""
    server = Server(open_session)
    server.engine.held = []
    leaks = []
    for cycle in range(5):
        leaks.append(server.allocator.malloc(64 * MIB))
        server.engine.held = [EngineAllocation(1 << 40, MIB, "kv_cache", is_asleep=True)]
        with server.session.engine_moves(sleeps=True):
            pass
        left = engine_in(published)["residual_bytes"]
        assert left[-1] == (600 + 64 * (cycle + 1)) * MIB - MIB

    assert Engine("vllm", residual_bytes=tuple(left)).residual_growth == 64 * MIB
    assert Engine("vllm", residual_bytes=(1, 2, 2, 3)).residual_growth == 0
    assert Engine("vllm", residual_bytes=(1, 2, 3)).residual_growth is None


def test_nothing_is_released_while_the_engine_moves(
    open_session: Opener, published: Published
) -> None:
    """Within sleep and wake_up the allocator is the engine's."""
    server = Server(open_session)
    server.allocator.free(server.allocator.malloc(200 * MIB))
    server.backend.step()
    with server.session.engine_moves(sleeps=True):
        assert server.session.release() == 0

    assert server.session.release() == 200 * MIB


def test_hooks_run_before_the_engine_wakes_up(open_session: Opener) -> None:
    """They are asked for what is missing at the driver, and not at all if nothing is."""
    server = Server(open_session)
    asked: list[int] = []
    server.session.on_pressure(asked.append)
    server.move("weights", "runtime", "kv_cache", sleeps=True)
    server.session.engine_wakes()
    assert asked == []

    server.gpu.use.cells[1] = 20_000 * MIB
    server.session.engine_wakes(timeout=0)
    assert len(asked) == 1
    assert asked[0] > 10_000 * MIB
    server.session.engine_wakes(["weights"], timeout=0)
    assert len(asked) == 1


def test_a_promise_to_a_sleeping_engine_is_kept(open_session: Opener) -> None:
    """`wait_for_memory` leaves what an engine takes again, unless it may borrow that."""
    server = Server(open_session)
    free = 81_920 - 600
    assert server.session.wait_for_memory((free - 10) * MIB, timeout=0, take=False)
    server.move("kv_cache", sleeps=True)

    assert not server.session.wait_for_memory((free - 10) * MIB, timeout=0, take=False)
    assert server.session.wait_for_memory((free - 73_400) * MIB, timeout=0, take=False)
    assert server.session.wait_for_memory((free - 10) * MIB, timeout=0, take=False, borrow=True)
