"""What the SDK counts as components, on tensors and optimizers that are only numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tensors import FakeCounter, FakeOptimizer, FakeTensor, allocator

from torchmem.sample.sample import Allocator, ByPool
from torchmem.sdk.components.components import Components
from torchmem.sdk.components.optimizers import MAX_MEMBERS, MAX_OPTIMIZERS
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.errors import Errors
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend, SimulatedOptimizer


class Training:
    """A process with optimizers, of which every tensor is known."""

    def __init__(self, parameters: Sequence[int] = (100, 200, 300)) -> None:
        self.counter = FakeCounter()
        self.errors = Errors()
        self.components = Components(
            self.counter, self.errors, self.counter.clock, None, self.counter.clock
        )
        self.optimizers: list[FakeOptimizer] = []
        self.held = 1000
        self.parts: dict[str, list[FakeTensor]] = {}
        self.add_optimizer(parameters)

    def add_optimizer(self, parameters: Sequence[int]) -> None:
        """Add an optimizer with one group."""
        group = {"params": [FakeTensor(size) for size in parameters]}
        self.optimizers.append(FakeOptimizer([group]))

    @property
    def parameters(self) -> Iterator[FakeTensor]:
        """All parameters."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def backward(self) -> None:
        """Give every parameter a gradient."""
        for parameter in self.parameters:
            parameter.grad = parameter.grad or FakeTensor(parameter.size)

    def optimize(self) -> None:
        """Create missing states and end the step of every optimizer."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    moments = [FakeTensor(parameter.size), FakeTensor(parameter.size)]
                    optimizer.state.setdefault(parameter, {"moments": moments, "kind": "adam"})
            self.components.see(optimizer)

    def truth(self) -> dict[str, int]:
        """Return the bytes of each component."""
        gradients = [parameter.grad for parameter in self.parameters]
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        named = {name: self._bytes(part) for name, part in self.parts.items()}
        return named | {
            "parameters": self._bytes(list(self.parameters)),
            "gradients": self._bytes(gradients),
            "optimizer_state": self._bytes(states),
            "held": self.held,
            "rounding": 7,
        }

    def _bytes(self, values: object) -> int:
        return sum(tensor.size for tensor in self.counter.tensors(values))

    def read(
        self, moment: Any = "step", more: int = 0, pending: tuple[int, int] = (0, 0)
    ) -> dict[str, int]:
        """Read the components with `more` bytes allocated in addition.

        `pending`: the bytes that were requested of pending blocks, and those of the blocks.
        """
        requested = sum(self.truth().values()) - 7 + more
        stats = allocator(requested, 7, pending)
        return self.components.read({0: stats}, moment).get(0, {})

    def step(self, seconds: float = 1000.0) -> dict[str, int]:
        """Run one step after a while, and read at its end."""
        self.counter.now += seconds
        self.backward()
        self.optimize()
        return self.read()


def test_the_first_step_is_counted_completely() -> None:
    """After the first step of a small model all components are known."""
    training = Training()
    found = training.step()

    assert training.truth() == found


events: dict[str, Callable[[Training, int], object]] = {
    "group": lambda t, size: t.optimizers[0].param_groups.append({"params": [FakeTensor(size)]}),
    "parameter": lambda t, size: t.optimizers[0].param_groups[0]["params"].append(FakeTensor(size)),
    "optimizer": lambda t, size: t.add_optimizer([size, size]),
    "end": lambda t, size: t.optimizers[1:] and t.optimizers.pop(),
    "held": lambda t, size: setattr(t, "held", size),
    "state": lambda t, size: t.optimizers[0].state.update({"more": [FakeTensor(size)]}),
    "gradient": lambda t, size: setattr(next(t.parameters), "grad", FakeTensor(size)),
}


@pytest.fixture
def _frozen() -> Iterator[None]:
    """Have the garbage collector look only at what the test makes."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_frozen")
@given(st.lists(st.tuples(st.sampled_from(sorted(events)), st.integers(1, 10**9)), max_size=6))
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_components_follow_every_change(changes: list[tuple[str, int]]) -> None:
    """Whatever changes between two steps, components are right again at the second next step."""
    training = Training()
    training.step()
    for name, size in changes:
        events[name](training, size)
        gc.collect()
        training.step()
        assert training.truth() == training.step()
    assert training.errors.counts["components"] == 0


def test_a_steady_training_is_counted_rarely() -> None:
    """After the first count no tensor is counted again for ten minutes."""
    training = Training([1] * 50)
    training.step()
    counted = training.counter.counted
    for _ in range(500):
        training.step(1.0)

    assert counted == training.counter.counted


def test_a_count_of_many_parameters_is_spread_over_steps() -> None:
    """No step counts for longer than the budget, and components come when all is counted."""
    training = Training([1] * 10_000)
    slices = []
    for _ in range(15):
        before = training.counter.now
        found = training.step(1.0)
        slices.append(training.counter.now - before - 1.0)
        assert found in ({}, training.truth())

    assert found
    assert max(slices) < 0.006
    assert len([slice_ for slice_ in slices if slice_ > 0.001]) > 7


def test_between_steps_what_was_added_is_the_step() -> None:
    """A read in the middle of a step shows what came since as `step`, beside what lasts."""
    training = Training()
    lasting = training.step()

    assert lasting | {"step": 5000} == training.read("idle", more=5000)


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_pending_memory_is_a_component(requested: int, rounding: int) -> None:
    """Freed memory that waits for a stream is `pending`; all others are as without it."""
    training = Training()
    lasting = training.step()

    found = training.read("step", 0, (requested, requested + rounding))

    assert lasting | {"pending": requested + rounding} == found


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**6), st.data())
def test_pending_memory_at_the_first_step(
    held: int, pending: int, slack: int, data: st.DataObject
) -> None:
    """All components add up to the active bytes, and only `held` and `rounding` are estimates."""
    training = Training()
    training.held, training.counter.now = held, 1000.0
    blocks = pending, pending + data.draw(st.integers(0, slack))
    training.backward()
    training.optimize()

    found = training.read("step", 0, blocks)

    truth = training.truth()
    assert sum(truth.values()) + blocks[1] == sum(found.values())
    assert min(found.values()) >= 0
    assert truth["held"] - slack <= found["held"] <= truth["held"]
    assert all(found[name] == truth[name] for name in truth.keys() - {"held", "rounding"})


impossible = st.integers(-(1 << 40), 1 << 40)


@given(*[impossible] * 4, st.sampled_from(["step", "idle", "oom"]))
def test_impossible_statistics_give_possible_components(
    allocated: int, active: int, requested: int, reserved: int, moment: Any
) -> None:
    """Whatever the statistics say, no component is negative; they add up, or there are none."""
    training = Training()
    training.step()
    sizes = [ByPool(0, size) for size in (allocated, active, reserved, requested)]
    stats = Allocator(sizes[0], sizes[1], sizes[2], sizes[3], None, 0, 0, 0)

    found = training.components.read({0: stats}, moment).get(0, {})

    assert min(found.values(), default=0) >= 0
    assert not found or sum(found.values()) == active


def test_another_thread_does_not_look_at_gradients(
    in_thread: Callable[[Callable[[], Any]], Any],
) -> None:
    """Read elsewhere, gradients and what the step allocated are one component, and add up."""
    training = Training()
    training.step()

    found = in_thread(lambda: training.read("idle", more=5000))

    truth = training.truth()
    assert "gradients" not in found
    assert truth["gradients"] + 5000 == found["gradients_or_step"]
    assert sum(truth.values()) + 5000 == sum(found.values())


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], Any]:
    """Runs a call in another thread and returns its result."""
    from concurrent.futures import ThreadPoolExecutor

    def run(call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result(10)

    return run


def test_nothing_is_known_without_optimizer_and_parts() -> None:
    """Without an optimizer or a tracked part there are no components."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock, None, counter.clock)

    assert components.read({0: allocator(500)}, "step") == {}


def test_tracked_parts_are_counted_alone() -> None:
    """Without an optimizer the parts are shown, and everything else as `held`."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock, None, counter.clock)
    cache = [FakeTensor(30), FakeTensor(40)]
    components.tracked.set("kv_cache", lambda: cache)
    components.tracked.set("weights", weights := FakeTensor(100))

    first = components.read({0: allocator(500, 12)}, "step")
    cache.append(FakeTensor(50))
    counter.now += 1000
    second = components.read({0: allocator(550, 12)}, "step")

    held = {"weights": weights.size, "held": 330, "rounding": 12}
    assert {0: {"kv_cache": 70, **held}} == first
    assert {0: {"kv_cache": 120, **held}} == second


def test_a_tracked_parameter_counts_as_the_part() -> None:
    """A part takes its tensors out of `parameters`; the sum stays the same."""
    training = Training([100, 200])
    lasting = training.step()
    training.components.tracked.set("embedding", next(training.parameters))

    assert lasting | {"embedding": 100, "parameters": 200} == training.step()


def test_tracked_tensors_are_not_kept_alive() -> None:
    """What the script frees is gone at the next step."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock, None, counter.clock)
    cache = [FakeTensor(30)]
    components.tracked.set("kv_cache", cache)
    assert components.read({0: allocator(100)}, "step")[0]["kv_cache"] == 30

    cache.clear()
    counter.now += 1000
    gc.collect()

    assert components.read({0: allocator(100)}, "step")[0]["kv_cache"] == 0


def test_a_preempted_count_does_not_freeze_a_part() -> None:
    """What a count costs is CPU time; after one that waited for a core the part stays current."""
    counter, waits = FakeCounter(), [5.0]
    cache = [FakeTensor(30)]
    components = Components(counter, Errors(), counter.clock, None, lambda: 0.0)

    def blocks() -> list[FakeTensor]:
        counter.now += waits.pop() if waits else 0.0
        return cache

    components.tracked.set("kv_cache", blocks)
    components.read({0: allocator(500)}, "step")
    cache.append(FakeTensor(50))
    counter.now += 1.0

    assert components.read({0: allocator(500)}, "step")[0]["kv_cache"] == 80


def test_one_slow_count_does_not_freeze_a_part() -> None:
    """After one count in which the garbage collector ran, the part is current within a minute."""
    counter, cpu = FakeCounter(), [1.0, 0.0]
    cache = [FakeTensor(30)]
    components = Components(
        counter, Errors(), counter.clock, None, lambda: cpu.pop() if cpu[1:] else cpu[0]
    )
    components.tracked.set("kv_cache", lambda: cache)
    components.read({0: allocator(500)}, "step")
    cache.append(FakeTensor(50))
    counter.now += 61.0

    assert components.read({0: allocator(500)}, "step")[0]["kv_cache"] == 80


def test_a_part_that_is_too_old_is_left_out() -> None:
    """Without a step for a minute, a callable's tensors are not known; with the next one they are.

    The components are then unknown between steps, because its bytes would be taken for the step's.
    """
    training = Training()
    cache = training.parts["kv_cache"] = [FakeTensor(30)]
    training.components.tracked.set("kv_cache", lambda: cache)
    training.step()
    training.step()
    training.counter.now += 50
    assert training.read("idle")["kv_cache"] == 30

    training.counter.now += 50
    assert training.read("idle") == {}
    assert training.step() in ({}, training.truth())
    assert training.truth() == training.step()


def test_a_callable_is_called_at_the_first_step() -> None:
    """A read before the first step, which does not call it, does not put it off."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock, None, counter.clock)
    cache = [FakeTensor(30)]
    components.tracked.set("kv_cache", lambda: cache)

    assert components.read({0: allocator(500)}, "idle") == {}
    assert components.read({0: allocator(500)}, "step")[0]["kv_cache"] == 30


def test_a_part_that_is_never_called_is_not_zero() -> None:
    """In inference without steps, a callable is unknown."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock, None, counter.clock)
    components.tracked.set("kv_cache", lambda: [FakeTensor(30)])
    components.tracked.set("weights", weights := FakeTensor(100))

    assert weights.size == 100
    assert components.read({0: allocator(500)}, "idle")[0] == {
        "weights": 100,
        "held": 400,
        "rounding": 0,
    }


def test_a_part_that_costs_too_much_is_left_out() -> None:
    """A part with so many tensors that it would be counted once in many minutes is not shown."""
    training = Training()
    lasting = training.step()
    many = [FakeTensor(0) for _ in range(40_000)]
    training.components.tracked.set("many", many)
    for _ in range(3):
        found = training.step()

    assert lasting == found


@pytest.mark.parametrize("name", ["", "parameters", "x" * 65, 7])
def test_an_impossible_name_is_ignored(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and nothing is raised."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock, None, counter.clock)
    components.tracked.set(name, FakeTensor(1))

    assert components.read({0: allocator(100)}, "step") == {}
    assert "is ignored" in caplog.text


def test_a_part_that_raises_is_left_out() -> None:
    """The other components stay, and the error is counted."""
    training = Training()
    lasting = training.step()
    training.components.tracked.set("broken", lambda: 1 / 0)

    assert lasting == training.step()
    assert training.errors.counts["components"] == 1


def test_thousands_of_optimizers_are_absent() -> None:
    """An optimizer for each of many parameters is given up, and later steps stay cheap."""
    training = Training()
    training.step()
    many = [FakeOptimizer([{"params": [FakeTensor(1)]}]) for _ in range(MAX_OPTIMIZERS)]
    for optimizer in many:
        training.components.see(optimizer)

    assert training.step() == {}
    assert training.errors.counts["components"] == 0


def test_more_counted_than_requested_is_absent() -> None:
    """Tensors outside the allocator's memory make the components of their device unknown."""
    training = Training()
    training.step()

    assert training.read(more=-2000) == {}


def test_without_requested_bytes_rounding_is_in_held() -> None:
    """An allocator that does not count requests has no `rounding`, and the rest still adds up."""
    training = Training()
    training.step()
    stats = replace(allocator(5000), requested_bytes=None)

    found = training.components.read({0: stats}, "step")[0]

    assert "rounding" not in found
    assert sum(found.values()) == 5000


def test_simulated_blocks_are_parameters(allocator: DeviceCachingAllocator) -> None:
    """The blocks of a simulated optimizer are parameters, and all others are held."""
    optimizer = SimulatedOptimizer([allocator.malloc(3000), allocator.malloc(5 << 20)])
    allocator.malloc(700)
    recorder = Recorder(SimulatedBackend([allocator]))
    recorder.components.see(optimizer)
    recorder.read_stats("step")

    (device,) = recorder.samples()
    known = {"parameters": 3000 + (5 << 20), "gradients": 0, "optimizer_state": 0, "held": 700}
    assert known | {"rounding": 72 + 324} == device.components


def test_millions_of_parameters_are_given_up() -> None:
    """A model with more parameters than a count may have is absent, and not counted again."""
    training = Training([])
    parameters = training.optimizers[0].param_groups[0]["params"]
    parameters += [FakeTensor(1)] * (MAX_MEMBERS * 3)
    training.components.see(training.optimizers[0])
    for _ in range(200):
        training.counter.now += 10.0
        assert training.components.read({0: allocator(10**9)}, "step") == {}
    counted = training.counter.counted
    training.counter.now += 10_000.0

    assert training.components.read({0: allocator(10**9)}, "step") == {}
    assert counted == training.counter.counted < MAX_MEMBERS * 2
    assert training.errors.counts["components"] == 0
