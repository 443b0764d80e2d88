"""What a step and a publication execute: a check that needs no clock.

The counts are those of the day they were recorded. If a change must execute more than a tenth more,
measure `python -m benchmarks.sdk_overhead` and record the new count here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.bytecodes import allowed, bytecodes

from torchmem.sdk.context import Context
from torchmem.sdk.monitor import Monitor
from torchmem.sdk.part import Part
from torchmem.sdk.parts import build
from torchmem.sdk.reading.run_history import EARLY_STEPS
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

STEP_BY_HAND = {(3, 10): 130, (3, 11): 135, (3, 12): 121, (3, 13): 116}
STEP_OF_AN_OPTIMIZER = {(3, 10): 238, (3, 11): 250, (3, 12): 230, (3, 13): 229}
ROUTINE_PUBLICATION = {(3, 10): 9958, (3, 11): 10364, (3, 12): 9500, (3, 13): 9468}
PUBLICATION_OF_STEPS = {(3, 10): 12883, (3, 11): 13466, (3, 12): 12250, (3, 13): 11750}
WARM_UP_STEPS = EARLY_STEPS * 3
"""The first steps are read for the history of the run, and later one in three, in four, …"""


class HookedBackend(SimulatedBackend):
    """Keeps what is to be called before and after each step of an optimizer."""

    after: Callable[[object], None]
    announces_steps = False

    def on_step_begin(self, callback: Callable[[object, bool], None]) -> Callable[[], None]:
        """Note that the next step is to be announced."""
        self.announces_steps = True

        def remove() -> None:
            self.announces_steps = False

        return remove

    def on_step(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """Keep the callback."""
        self.after = callback
        return lambda: None


class Optimizer:
    """An optimizer without parameters."""

    def __init__(self) -> None:
        self.param_groups: list[Any] = []
        self.state: dict[Any, Any] = {}


@pytest.fixture
def backend() -> HookedBackend:
    """Return a backend with one GPU."""
    return HookedBackend([DeviceCachingAllocator(SimulatedGpu())])


@pytest.fixture
def session(backend: HookedBackend, tmp_path: Path) -> Any:
    """Yield a session that reads only at its first step."""
    with Session(resolve({"interval": 3600.0, "run_dir": tmp_path}, {}), backend, {}) as session:
        session.step()
        yield session


def test_a_step_by_hand(session: Session) -> None:
    """`session.step()` without a read executes no more than a tenth more than recorded."""
    for _ in range(WARM_UP_STEPS):
        session.step()
    limit = allowed(STEP_BY_HAND)
    assert limit is None or min(bytecodes(session.step) for _ in range(4)) <= limit


def test_a_step_of_an_optimizer(backend: HookedBackend, tmp_path: Path) -> None:
    """The hooks before and after an optimizer's step execute no more than recorded."""
    optimizer = Optimizer()

    settings = resolve({"interval": 3600.0, "run_dir": tmp_path}, {})
    with Session(settings, backend, {}):
        step = partial(backend.after, optimizer)
        for _ in range(WARM_UP_STEPS):
            step()
        limit = allowed(STEP_OF_AN_OPTIMIZER)
        assert limit is None or min(bytecodes(step) for _ in range(4)) <= limit
        # PyTorch's hook before the step finds nothing to call.
        assert not backend.announces_steps


def test_routine_publications(backend: HookedBackend, tmp_path: Path) -> None:
    """Publications without news, and of new steps, execute no more than recorded.

    They are most of each tick.
    """
    monitors = []

    def parts(context: Context, monitor: Monitor) -> Iterable[Part]:
        monitors.append(monitor)
        return build(context, monitor)

    settings = resolve({"interval": 3600.0, "run_dir": tmp_path}, {})
    with Session(settings, backend, {}, parts) as session:
        for _ in range(WARM_UP_STEPS):
            session.step()
        publish = partial(monitors[0].publish, routine=True)

        def publish_step() -> None:
            session.step()
            publish()

        # One of them may publish a heartbeat. A snapshot of the background thread makes all larger.
        for call, counts in ((publish, ROUTINE_PUBLICATION), (publish_step, PUBLICATION_OF_STEPS)):
            limit = allowed(counts)
            assert limit is None or min(bytecodes(call) for _ in range(10)) <= limit
