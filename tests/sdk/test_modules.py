"""Parameters by module, where no optimizer steps: found once, past the script's code, or absent."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors import FakeCounter, FakeOptimizer, FakeTensor, allocator

from torchmem.sdk.components.components import Components
from torchmem.sdk.components.modules import MAX_PARAMETERS
from torchmem.sdk.pytorch.seen_modules import MAX_MODULES, SeenModules
from torchmem.sdk.safety.cost import MAX_SLICE_SECONDS, MODULES_AFTER_SECONDS
from torchmem.sdk.safety.errors import Errors

ROUNDING = 7
OTHER = 1000


class Module:
    """What torch.nn.Module keeps in its dict."""

    def __init__(self, *sizes: int, **submodules: Module | None) -> None:
        self._parameters: Any = {str(index): FakeTensor(size) for index, size in enumerate(sizes)}
        self._parameters["bias"] = None
        self._modules = submodules

    def move(self) -> None:
        """Give the parameters of all modules other storages."""
        own = self._parameters.items()
        self._parameters = {name: old and FakeTensor(old.size) for name, old in own}
        for module in self._modules.values():
            if module:
                module.move()


class Inference:
    """A process that constructs modules, and whose parameters are all known."""

    def __init__(self, main: Mapping[str, object] | None = None, most: int = MAX_MODULES) -> None:
        self.counter = FakeCounter()
        self.errors = Errors()
        self.seen = SeenModules(Module, lambda: main or {}, most)
        self.components = Components(
            self.counter, self.errors, self.counter.clock, modules=self.seen
        )
        self.read(0)

    def construct(self, *sizes: int) -> Module:
        """Construct a module, which registers its parameters one by one."""
        module = Module(*sizes)
        for _ in sizes:
            self.seen.see(module)
        return module

    def read(self, parameters: int, seconds: float = 0.0, moment: Any = "idle") -> dict[str, int]:
        """Read after some time, with these bytes of parameters and others allocated."""
        self.counter.now += seconds
        requested = parameters + OTHER
        return self.components.read({0: allocator(requested, ROUNDING)}, moment).get(0, {})

    def read_until_counted(self, parameters: int) -> dict[str, int]:
        """Read once a second, as while no step comes; return the first components."""
        for _ in range(1000):
            found = self.read(parameters, 1.0)
            if found:
                return found
        return {}


def components(parameters: int) -> dict[str, int]:
    """Return what is shown for these bytes of parameters."""
    return {"parameters": parameters, "held": OTHER, "rounding": ROUNDING}


def test_parameters_are_shown_if_no_optimizer_steps() -> None:
    """After half a minute without one, parameters, rest and rounding add up to allocated."""
    inference = Inference()
    kept = [inference.construct(100, 200), inference.construct(300)]

    assert inference.read(600, MODULES_AFTER_SECONDS - 1) == {}
    assert components(600) == inference.read(600, 1.0)
    assert components(600) == inference.read(600, moment="oom")
    assert kept


def test_modules_from_before_the_sdk_are_found_in_the_main_script() -> None:
    """Modules among its globals count with all their submodules, shared ones once."""
    shared = Module(5)
    main = {"model": Module(100, encoder=Module(20, a=shared, b=shared, c=None)), "name": "x"}

    assert components(125) == Inference(main).read_until_counted(125)
    assert Inference({"names": [1, "x"]}).read(500, 1000.0) == {}


class Lazy(Module):
    """A module of a script that evaluates attributes, or fails, whenever it is asked for one."""

    asked: list[str]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") or name in {"__dict__", "__class__"}:
            Lazy.asked.append(name)
            raise RuntimeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        Lazy.asked.append(name)
        return Module(10**9)

    def __eq__(self, other: object) -> bool:
        Lazy.asked.append("__eq__")
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


def test_no_code_of_the_script_runs() -> None:
    """Neither attributes, nor comparisons and hashes, of a module are evaluated."""
    Lazy.asked = []
    module = Lazy(40, child=Module(2))
    inference = Inference({"model": module, "again": module})
    inference.seen.see(module)

    assert components(42) == inference.read_until_counted(42)
    assert Lazy.asked == []
    assert inference.errors.counts["components"] == 0


def test_modules_are_not_kept_alive() -> None:
    """A model that the script drops is gone at once, also while it is being counted."""
    inference = Inference()
    modules = [inference.construct(1) for _ in range(20_000)]
    inference.read(20_000, MODULES_AFTER_SECONDS)
    inference.read(20_000, 1.0)
    gone = [weakref.ref(module) for module in modules]
    del modules
    gc.collect()

    assert not any(module() for module in gone)
    assert inference.read_until_counted(0) == {}
    assert inference.errors.counts["components"] == 0


def test_a_count_is_spread_over_reads() -> None:
    """No read takes longer than a slice, whatever the number of modules."""
    inference = Inference()
    modules = [inference.construct(1, 1) for _ in range(20_000)]
    longest, found = 0.0, dict[str, int]()
    while not found:
        before = inference.counter.now
        found = inference.read(40_000, 1.0)
        longest = max(longest, inference.counter.now - before - 1.0)

    assert components(40_000) == found
    assert longest < MAX_SLICE_SECONDS + 0.001
    assert len(modules) == 20_000


@given(st.lists(st.sampled_from(["move", "add", "drop", "wait", "read"]), max_size=12))
@settings(max_examples=50, deadline=None)
def test_a_change_makes_the_components_absent_until_the_next_count(changes: list[str]) -> None:
    """Whether modules are added, moved or dropped, what is shown is right."""
    inference, modules = Inference(), list[Module]()
    for change in changes:
        if change == "add":
            modules.append(inference.construct(10, 20))
        elif change == "move":
            list(map(Module.move, modules))
        elif change == "drop" and modules:
            del modules[-1]
        truth = 30 * len(modules)
        found = inference.read(truth, 100.0 if change == "wait" else 0.1)
        assert found in ({}, components(truth))
    truth = 30 * len(modules)
    assert (components(truth) if truth else {}) == inference.read_until_counted(truth)


def test_an_optimizer_that_steps_takes_over() -> None:
    """From then on the parameters are those of optimizers, as if there were no modules."""
    inference = Inference()
    module = inference.construct(100)
    assert components(100) == inference.read_until_counted(100)

    optimizer = FakeOptimizer([{"params": [FakeTensor(50)]}])
    inference.components.see(optimizer)
    found = inference.read(100, 1000.0, "step")

    assert (found["parameters"], found["gradients"]) == (50, 0)
    assert module


def test_tracked_parts_are_shown_alone() -> None:
    """What the script names itself is not divided any further."""
    inference = Inference()
    module = inference.construct(100)
    inference.components.tracked.set("weights", list(module._parameters.values())[:1])

    assert inference.read(100, 1000.0) == {"weights": 100, "held": OTHER, "rounding": ROUNDING}
    inference.components.tracked.set("weights", lambda: 1 / 0)
    assert inference.read(100, 1000.0, "step") == {}


@pytest.mark.parametrize(
    "parameters",
    [{"huge": None}, None, "text", {str(index): FakeTensor(1) for index in range(5000)}],
    ids=["none", "no dict", "text", "too many"],
)
def test_odd_modules_are_absent(parameters: Any) -> None:
    """Without a parameter that can be counted, or with too many in one module, nothing is shown."""
    inference = Inference()
    module = inference.construct(1)
    module._parameters = parameters

    assert inference.read_until_counted(5000) == {}
    assert inference.errors.counts["components"] == 0
    assert MAX_PARAMETERS < 5000


def test_very_many_modules_are_given_up() -> None:
    """Modules that are gone are forgotten; too many that live make the parameters absent."""
    inference = Inference(most=100)
    for _ in range(1000):
        inference.construct(1)
    modules = [inference.construct(8)]
    assert components(8) == inference.read_until_counted(8)

    modules += [inference.construct(1) for _ in range(100)]
    assert inference.read_until_counted(108) == {}
    assert len(modules) == 101
