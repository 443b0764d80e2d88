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

from torchmem.sdk._components import Components
from torchmem.sdk._errors import Errors
from torchmem.sdk._optimizers import MAX_MEMBERS, MAX_OPTIMIZERS
from torchmem.sdk._recorder import Recorder
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend, SimulatedOptimizer


class Training:
    """A process with optimizers, of which every tensor is known."""

    def __init__(self, parameters: Sequence[int] = (100, 200, 300)) -> None:
        self.counter = FakeCounter()
        self.errors = Errors()
        self.components = Components(self.counter, self.errors, self.counter.clock)
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

    def read(self, moment: Any = "step", more: int = 0) -> dict[str, int]:
        """Read the components with `more` bytes allocated in addition."""
        requested = sum(self.truth().values()) - 7 + more
        return self.components.read({0: allocator(requested, 7)}, moment).get(0, {})

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
    assert 0 == training.errors.counts["components"]


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
    components = Components(counter, Errors(), counter.clock)

    assert {} == components.read({0: allocator(500)}, "step")


def test_tracked_parts_are_counted_alone() -> None:
    """Without an optimizer the parts are shown, and everything else as `held`."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock)
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
    components = Components(counter, Errors(), counter.clock)
    cache = [FakeTensor(30)]
    components.tracked.set("kv_cache", cache)
    assert 30 == components.read({0: allocator(100)}, "step")[0]["kv_cache"]

    cache.clear()
    counter.now += 1000
    gc.collect()

    assert 0 == components.read({0: allocator(100)}, "step")[0]["kv_cache"]


@pytest.mark.parametrize("name", ["", "parameters", "x" * 65, 7])
def test_an_impossible_name_is_ignored(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and nothing is raised."""
    counter = FakeCounter()
    components = Components(counter, Errors(), counter.clock)
    components.tracked.set(name, FakeTensor(1))

    assert {} == components.read({0: allocator(100)}, "step")
    assert "is ignored" in caplog.text


def test_a_part_that_raises_is_left_out() -> None:
    """The other components stay, and the error is counted."""
    training = Training()
    lasting = training.step()
    training.components.tracked.set("broken", lambda: 1 / 0)

    assert lasting == training.step()
    assert 1 == training.errors.counts["components"]


def test_thousands_of_optimizers_are_absent() -> None:
    """An optimizer for each of many parameters is given up, and later steps stay cheap."""
    training = Training()
    training.step()
    many = [FakeOptimizer([{"params": [FakeTensor(1)]}]) for _ in range(MAX_OPTIMIZERS)]
    for optimizer in many:
        training.components.see(optimizer)

    assert {} == training.step()
    assert 0 == training.errors.counts["components"]


def test_more_counted_than_requested_is_absent() -> None:
    """Tensors outside the allocator's memory make the components of their device unknown."""
    training = Training()
    training.step()

    assert {} == training.read(more=-2000)


def test_without_requested_bytes_rounding_is_in_held() -> None:
    """An allocator that does not count requests has no `rounding`, and the rest still adds up."""
    training = Training()
    training.step()
    stats = replace(allocator(5000), requested_bytes=None)

    found = training.components.read({0: stats}, "step")[0]

    assert "rounding" not in found
    assert 5000 == sum(found.values())


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
        assert {} == training.components.read({0: allocator(10**9)}, "step")
    counted = training.counter.counted
    training.counter.now += 10_000.0

    assert {} == training.components.read({0: allocator(10**9)}, "step")
    assert counted == training.counter.counted < MAX_MEMBERS * 2
    assert 0 == training.errors.counts["components"]
