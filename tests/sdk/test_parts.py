"""The monitor calls every part of its list, and an error of a part ends only that call."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.waiting import until

from torchmem.sample.sample import Sample
from torchmem.sdk.context import Context
from torchmem.sdk.draft import Draft
from torchmem.sdk.monitor import Monitor
from torchmem.sdk.observation import Oom
from torchmem.sdk.part import Part, StepAction
from torchmem.sdk.parts import build
from torchmem.sdk.session import Session
from torchmem.sdk.settings import Settings
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend, SimulatedOptimizer
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20


class Toy(Part):
    """Notes its calls; all of them fail if it `is_broken`."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.calls: list[str] = []
        self._is_broken = is_broken

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._is_broken:
            raise ValueError(call)

    def begin(self) -> None:
        self._note("begin")

    @property
    def due_step(self) -> float:
        return 3 if "step" not in self.calls else math.inf

    def at_step(self) -> StepAction | None:
        self._note("step")
        return None

    def after_read(self, step: int | None) -> None:
        self._note(f"read {step}")

    def at_tick(self) -> None:
        self._note("tick")

    def complete(self, sample: Draft) -> None:
        self._note("complete")
        sample.add(metrics_url="http://toy")

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        self._note("publish" if routine else "publish now")

    def at_oom(self, oom: Oom) -> None:
        cause = oom.observation.oom.cause if oom.observation else None
        self._note(f"oom {cause}")

    def end(self, *, may_read: bool) -> None:
        self._note("end" if may_read else "end without the allocator")


class Reading(Toy):
    """Has a read made at a step after the first ones."""

    def __init__(self, action: StepAction) -> None:
        super().__init__()
        self._action = action

    @property
    def due_step(self) -> float:
        return math.inf if "read 120" in self.calls else 120

    def at_step(self) -> StepAction | None:
        return self._action


class Resettable(SimulatedBackend):
    """A backend whose CUDA may be gone."""

    is_gone = False

    def is_initialized(self) -> bool:
        """Return whether CUDA counts as initialized."""
        return not self.is_gone and super().is_initialized()


def monitored(backend: SimulatedBackend, run_dir: Path, toy: Toy) -> Session:
    """Open a session with one part more."""

    def parts(context: Context, monitor: Monitor) -> Iterable[Part]:
        return *build(context, monitor), toy

    return Session(Settings(run_dir=run_dir, interval=0.05), backend, {}, parts)


def live(session: Session, allocator: DeviceCachingAllocator, toy: Toy) -> None:
    """Run three steps and out of memory."""
    for _ in range(3):
        session.step()
    until(lambda: "tick" in toy.calls)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    session.close()


def test_a_part_is_called_from_its_begin_to_its_end(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend, tmp_path: Path
) -> None:
    """A part sees each kind of event, and adds its piece to the sample that is published."""
    session = monitored(backend, tmp_path, toy := Toy())
    live(session, allocator, toy)

    assert toy.calls[0] == "begin"
    assert {"read 1", "step", "tick", "publish", "oom capacity"} <= {*toy.calls}
    assert toy.calls[-3:] == ["complete", "publish now", "end"]
    assert session.newest
    assert session.newest.metrics_url == "http://toy"
    assert sum(session.errors.counts.values()) == 0


def test_a_broken_part_harms_neither_the_script_nor_other_parts(
    allocator: DeviceCachingAllocator, backend: SimulatedBackend, tmp_path: Path
) -> None:
    """Its errors count under its stage, and the other parts do their work."""
    session = monitored(backend, tmp_path, toy := Toy(is_broken=True))
    live(session, allocator, toy)

    counts = session.errors.counts
    assert sum(counts.values()) == counts["setup"] == len(toy.calls)
    assert session.newest
    assert session.newest.ended == "exited"
    assert session.newest.host is not None
    assert len([*tmp_path.rglob("*oom.json")]) == 1


def test_a_part_is_called_at_its_step_without_a_read(
    backend: SimulatedBackend, tmp_path: Path
) -> None:
    """Most steps are not read, and a part is called only where it is due."""
    toy, settings = Toy(), Settings(run_dir=tmp_path, interval=3600.0)
    session = Session(settings, backend, {}, lambda _context, _monitor: (toy,))
    for _ in range(5):
        session.step()
    calls = [call for call in toy.calls if "step" in call or "read" in call]
    session.close()

    assert calls == ["read 1", "step"]


def test_only_parts_that_may_read_call_a_driver_that_hangs(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    """If CUDA is gone at the end, the last state is published, and parts are told not to read."""
    toy, settings = Toy(), Settings(run_dir=tmp_path, interval=3600.0)
    backend = Resettable([allocator])
    session = Session(settings, backend, {}, lambda _context, _monitor: (toy,))
    allocator.malloc(MIB)
    session.step()
    backend.is_gone = True
    session.close()

    assert toy.calls[-3:] == ["complete", "publish now", "end without the allocator"]


@pytest.mark.parametrize(
    ("action", "reads"), [("read", ["read 120"]), ("watch", ["read 120", "read 121"])]
)
def test_a_part_asks_for_a_read(
    allocator: DeviceCachingAllocator,
    backend: SimulatedBackend,
    tmp_path: Path,
    action: StepAction,
    reads: list[str],
) -> None:
    """The step after it is read too only if the part asks for that."""
    toy, settings = Reading(action), Settings(run_dir=tmp_path, interval=3600.0)
    session = Session(settings, backend, {}, lambda _context, _monitor: (toy,))
    optimizer = SimulatedOptimizer([allocator.malloc(MIB)])
    for _ in range(124):
        backend.step(optimizer)
    session.close()

    calls = [call for call in toy.calls if call.startswith("read 12")]
    assert calls == reads
