"""Inference engines: what they hold awake and asleep, their plan, and what each sleep leaves.

The numbers are those of vLLM 0.33 on a GPU of 80 GB (tests/serving), with a model of two layers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import decode, failure_reason
from torchmem.explain.remedies import remedies
from torchmem.explain.serving import engine_advice
from torchmem.integrations.vllm_terms import VLLM
from torchmem.sample.engine import Engine
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sdk import EngineAllocation, EnginePlan, EngineTerms, ServedEngine
from torchmem.sdk.engine import MIN_STEPS, divided, kv_cache_advice, residual_growth
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.blocks import Block
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
    terms: EngineTerms = VLLM
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
        self.served = ServedEngine(self.session)
        self.served.serve(self.engine)
        self.served.ready()

    def move(self, *asleep: str, sleeps: bool = False) -> None:
        """Have the engine fall asleep or wake up."""
        with self.served.moves(sleeps=sleeps):
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

    assert divided(allocations(), parts, VLLM.within) == (awake, {})
    assert divided(allocations("weights", "runtime", "kv_cache"), parts, VLLM.within) == ({}, awake)
    sizes = {"weights": 5, "kv_cache": 7}
    assert divided([], sizes, VLLM.within) == (sizes, {})


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


def sleep_beside(server: Server, neighbor: int = 0) -> None:
    """Have the engine sleep, whose memory stays reserved, beside a neighbor with some bytes."""
    server.allocator.malloc(WEIGHTS + RUNTIME + KV_CACHE)
    server.gpu.use.cells[1] = neighbor - (WEIGHTS + RUNTIME + KV_CACHE)
    server.move("weights", "runtime", "kv_cache", sleeps=True)


def fail_to_wake_up(server: Server, *parts: str, freed: Iterable[Block] = ()) -> None:
    """Have the engine wake up all but the KV cache, and fail; blocks are freed into the cache."""
    server.gpu.use.cells[1] += WEIGHTS + RUNTIME
    server.served.wakes(parts or None, timeout=0)

    def wake_up() -> None:
        with server.served.moves():
            for block in freed:
                server.allocator.free(block)
            server.engine.held = allocations("kv_cache")
            raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp")

    with pytest.raises(RuntimeError, match="CUDA Error"):
        wake_up()


def test_a_failed_wake_up_is_published_and_counted(
    open_session: Opener, published: Published
) -> None:
    """The engine's exception passes, what woke up is shown, and who has the memory is the cause."""
    server = Server(open_session)
    sleep_beside(server, 60_000 * MIB)
    fail_to_wake_up(server)

    device = published()[0]["devices"][0]
    assert engine_in(published)["asleep"] == {"kv_cache": KV_CACHE}
    assert device["counters"]["ooms"] == {"external": 1}
    assert device["last_oom"]["at_wake_up"]
    assert device["last_oom"]["requested_bytes"] == KV_CACHE


def test_the_cause_of_a_failed_wake_up_may_be_here(
    open_session: Opener, published: Published
) -> None:
    """If this process's cache would have been enough, it is the cause; else the run needs less."""
    server = Server(open_session)
    sleep_beside(server)
    block = server.allocator.malloc(20_000 * MIB)
    fail_to_wake_up(server)
    assert published()[0]["devices"][0]["counters"]["ooms"] == {"capacity": 1}

    fail_to_wake_up(server, freed=[block])
    assert published()[0]["devices"][0]["counters"]["ooms"] == {"capacity": 1, "library": 1}


def test_the_report_of_a_failed_wake_up(open_session: Opener, tmp_path: Path) -> None:
    """It says what the engine lacked, who had it, and what to do, and nothing about PyTorch."""
    server = Server(open_session)
    sleep_beside(server, 60_000 * MIB)
    fail_to_wake_up(server, "kv_cache")
    (file,) = tmp_path.rglob("*.oom.json")
    report = decode(file.read_bytes())

    assert headline(report) == (
        "The engine could not wake up: 51.30 GiB was missing, and 58.59 GiB (73% of the GPU) was "
        "held by other processes"
    )
    assert " ".join(failure_reason(report)) == (
        "To wake up, the vllm engine was still to take 71.60 GiB from the driver on cuda:0, "
        "outside PyTorch's allocator. The driver had 20.30 GiB free. Other processes, or libraries "
        "other than PyTorch, held 58.59 GiB."
    )
    advice = [remedy.text for remedy in remedies(report)]
    assert advice[0].startswith("Find out what holds the memory")
    assert any("asleep" in text for text in advice)
    assert not any("batch" in text for text in advice)


def test_peaks_count_from_ready_on(open_session: Opener, published: Published) -> None:
    """The warm-up's peak does not count; activations are what exceeds the bytes at rest."""
    server = Server(open_session)
    for _ in range(MIN_STEPS):
        server.backend.step()
    server.allocator.free(server.allocator.malloc(40 * MIB))
    server.backend.step()
    server.served.changed()

    assert engine_in(published)["peaks"]["activations"] == 40 * MIB
    assert engine_in(published)["kv_cache_advice_bytes"] == kv_cache_advice(
        PLAN, {"activations": 40 * MIB}
    )


def test_what_each_sleep_leaves(open_session: Opener, published: Published) -> None:
    """It grows if every sleep leaves more than the one before."""
    server = Server(open_session)
    server.engine.held = []
    leaks = []
    for cycle in range(5):
        leaks.append(server.allocator.malloc(64 * MIB))
        server.engine.held = [EngineAllocation(1 << 40, MIB, "kv_cache", is_asleep=True)]
        with server.served.moves(sleeps=True):
            pass
        left = engine_in(published)["residual_bytes"]
        assert left[-1] == (600 + 64 * (cycle + 1)) * MIB - MIB

    assert engine_in(published)["residual_growth_bytes"] == 64 * MIB


@pytest.mark.parametrize(
    ("left", "growth"),
    [
        ((1, 2, 3), None),
        ((1, 2, 2, 3), 0),
        ((50, 50, *range(51, 57)), 1),
        ((50, 50, *range(52, 66, 2)), 2),
        ((*range(10), 9, 9, 9, 9), 0),
    ],
)
def test_what_stays_may_begin_to_grow_later(left: tuple[int, ...], growth: float | None) -> None:
    """Growth that has begun counts from its beginning, and growth that has ended does not."""
    assert residual_growth([size * MIB for size in left]) == (growth and growth * MIB)


def test_nothing_is_released_while_the_engine_moves(
    open_session: Opener, published: Published
) -> None:
    """Within sleep and wake_up the allocator is the engine's."""
    server = Server(open_session)
    server.allocator.free(server.allocator.malloc(200 * MIB))
    server.backend.step()
    with server.served.moves(sleeps=True):
        assert server.session.release() == 0

    assert server.session.release() == 200 * MIB


def test_hooks_run_before_the_engine_wakes_up(open_session: Opener) -> None:
    """They are asked for what is missing at the driver, and not at all if nothing is."""
    server = Server(open_session)
    asked: list[int] = []
    server.session.on_pressure(asked.append)
    server.move("weights", "runtime", "kv_cache", sleeps=True)
    server.served.wakes()
    assert asked == []

    server.gpu.use.cells[1] = 20_000 * MIB
    server.served.wakes(timeout=0)
    assert len(asked) == 1
    assert asked[0] > 10_000 * MIB
    server.served.wakes(["weights"], timeout=0)
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


def test_a_wait_in_vain_names_the_engine_that_is_awake(
    open_session: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once what the other process holds in its KV cache, and how to get it."""
    server = Server(open_session)
    server.move()
    (sample,) = tmp_path.rglob(f"*{SAMPLE_SUFFIX}")
    sample.with_name(f"0-1-1{SAMPLE_SUFFIX}").write_bytes(sample.read_bytes())

    assert server.session.wait_for_memory(MIB, timeout=0, take=False)
    assert caplog.messages == []
    for _ in range(2):
        assert not server.session.wait_for_memory(90_000 * MIB, timeout=0, take=False)

    (message,) = caplog.messages
    assert message == (
        f"wait_for_memory timed out. Process {os.getpid()} uses the same GPU, and its inference "
        "engine holds 71.60 GiB in the KV cache, which only sleep mode returns: have the engine's "
        "owner call sleep()."
    )


def test_another_process_s_broken_sample_ends_no_wait(
    open_session: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What an engine in it would hold is unknown then."""
    server = Server(open_session)
    server.move()
    (sample,) = tmp_path.rglob(f"*{SAMPLE_SUFFIX}")
    content = json.loads(sample.read_bytes())
    content["devices"][0]["engine"]["resident"]["kv_cache"] = "many"
    sample.with_name(f"0-1-1{SAMPLE_SUFFIX}").write_text(json.dumps(content))

    assert not server.session.wait_for_memory(90_000 * MIB, timeout=0, take=False)
    assert caplog.messages == []


def test_an_unknown_engine_gets_no_arguments_of_another() -> None:
    """The advice is the same in words, and has no line to type that the engine may not have."""
    resident = {"kv_cache": 8 << 30, "cudagraph": 1 << 30, "lora": 1 << 30}
    known = list(engine_advice(Engine("vllm", resident), 1 << 30))
    unknown = list(engine_advice(Engine("other", resident), 1 << 30))

    assert [each.text for each in known] == [each.text for each in unknown]
    assert all(each.lines for each in known)
    assert not any(each.lines for each in unknown)
