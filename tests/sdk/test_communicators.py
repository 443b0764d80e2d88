"""What the SDK publishes of NCCL's communicators, by process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from torchmem.allocator.process_groups import CommunicatorMemory
from torchmem.sample.libraries import MAX_GROUPS, OTHER_GROUPS, Communicator
from torchmem.sdk.pytorch.process_groups import process_groups
from torchmem.sdk.reading.communicators import GrowthOutside, largest
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

MIB = 1 << 20


@dataclass
class Group:
    """A process group whose communicators NCCL counts, unless `counted` is None."""

    name: str
    counted: CommunicatorMemory | None
    device: int | None = 0
    is_ready: bool = True
    begun: int | None = 1
    reads: int = 0

    def collectives(self) -> int | None:
        return self.begun

    def memory(self) -> CommunicatorMemory | None:
        assert self.is_ready
        self.reads += 1
        return self.counted

    def suspend(self) -> None:
        assert self.counted
        self.counted = CommunicatorMemory(
            self.counted.persistent, self.counted.suspendable, is_suspended=True
        )

    def resume(self) -> None:
        assert self.counted
        self.counted = CommunicatorMemory(
            self.counted.persistent, self.counted.suspendable, is_suspended=False
        )


@dataclass
class Groups:
    """The process groups of a process, which a test changes."""

    all: list[Group] = field(default_factory=list)


class DistributedBackend(SimulatedBackend):
    """A simulated GPU in a process with process groups."""

    def __init__(self, allocator: DeviceCachingAllocator, groups: Groups) -> None:
        super().__init__([allocator])
        self._groups = groups

    def process_groups(self) -> list[Group]:
        return self._groups.all


@pytest.fixture
def groups() -> Groups:
    """No process group yet."""
    return Groups()


@pytest.fixture
def session(
    allocator: DeviceCachingAllocator, groups: Groups, open_session: Callable[..., Session]
) -> Session:
    """A session of a process with these groups, after its first allocation."""
    session = open_session(DistributedBackend(allocator, groups))
    allocator.malloc(8 * MIB)
    return session


def step(session: Session) -> dict[str, Communicator]:
    """End a step that is read, and return what is published."""
    session.lifetime.monitor.reader.next_read = 0.0
    session.step()
    (device,) = session.lifetime.monitor.sample().devices
    return device.communicators


def counted(persistent: int, suspendable: int) -> CommunicatorMemory:
    return CommunicatorMemory(persistent * MIB, suspendable * MIB, is_suspended=False)


def test_what_nccl_counts_is_published_by_group(session: Session, groups: Groups) -> None:
    """Groups of one name are added up; one whose communicators do not exist is left out."""
    groups.all = [
        Group("tp", counted(100, 300)),
        Group("tp", counted(1, 2)),
        Group("default_pg", counted(200, 0)),
        Group("later", counted(0, 0), is_ready=False),
    ]
    found = step(session)

    assert found.keys() == {"tp", "default_pg"}
    assert (found["tp"].persistent_bytes, found["tp"].suspendable_bytes) == (101 * MIB, 302 * MIB)
    assert found["default_pg"].is_counted


def test_nccl_is_read_rarely_and_when_groups_appear(session: Session, groups: Groups) -> None:
    """Most reads of the statistics do not read NCCL."""
    first = Group("first", counted(1, 0))
    groups.all = [first]
    for _ in range(5):
        step(session)
    assert first.reads == 1

    groups.all = [first, Group("second", counted(2, 0))]
    assert step(session).keys() == {"first", "second"}
    assert first.reads == 2
    groups.all = [first]
    assert step(session).keys() == {"first"}


def test_between_steps_nccl_is_left_alone(session: Session, groups: Groups) -> None:
    """A read outside of a step's end may be within a collective, so it does not ask NCCL."""
    groups.all = [Group("first", counted(1, 0))]
    session.lifetime.monitor.read_here()

    assert groups.all[0].reads == 0


def test_a_group_of_an_unknown_device_is_absent(session: Session, groups: Groups) -> None:
    """In a process on several GPUs, PyTorch does not say which one a group uses."""
    groups.all = [Group("first", counted(1, 0), device=None)]

    assert step(session) == {}


def test_growth_belongs_to_what_has_appeared() -> None:
    """Without NCCL's counts, the growth between two reads is that of the groups between them."""
    growth = GrowthOutside(before=500)
    assert growth.attributed(set(), 600) == {}
    growth.note(600)
    assert growth.attributed({"a", "b"}, 1_000) == {"a, b": Communicator(400, is_counted=False)}
    growth.note(1_000)
    assert growth.attributed({"a", "b"}, 3_000) == {"a, b": Communicator(400, is_counted=False)}
    growth.note(3_000)
    found = growth.attributed({"a", "b", "c"}, 3_100)
    assert found["c"].persistent_bytes == 100
    assert growth.attributed({"c"}, 2_700).keys() == {"c"}


@pytest.mark.parametrize(("before", "now"), [(None, 10), (10, None), (10, 10), (10, 5)])
def test_growth_that_is_not_known_is_absent(before: int | None, now: int | None) -> None:
    """Without both reads, or without growth, nothing is attributed, now or later."""
    growth = GrowthOutside(before)

    assert growth.attributed({"a"}, now) == {}
    assert growth.attributed({"a"}, 1_000) == {}


def test_growth_is_published_as_an_estimate(
    session: Session, groups: Groups, allocator: DeviceCachingAllocator
) -> None:
    """Where NCCL does not count, the growth is marked."""
    step(session)
    allocator.gpu.use.claim(64 * MIB, allocator.gpu.total_bytes)
    groups.all = [Group("default_pg", None)]

    assert step(session) == {"default_pg": Communicator(64 * MIB, is_counted=False)}


def test_many_groups_are_few_entries() -> None:
    """The largest groups keep their names; the bytes of the others are added up."""
    many = {f"group {size}": Communicator(size, size) for size in range(1, 50)}
    kept = largest(many)

    assert len(kept) == MAX_GROUPS
    assert "group 49" in kept
    assert sum(each.held_bytes for each in kept.values()) == 2 * sum(range(1, 50))
    assert kept[OTHER_GROUPS].suspendable_bytes == sum(range(1, 50 - MAX_GROUPS + 1))


def torch_with(groups: dict[Any, str]) -> Any:
    """Return as much of torch as the SDK asks for process groups."""
    distributed = SimpleNamespace(
        distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_names=groups)),
    )
    return SimpleNamespace(distributed=distributed, device=str)


class Backend:
    """A backend of torch.distributed by its name, with memory statistics."""

    def __init__(self, name: str, stats: dict[str, int] | Exception) -> None:
        self.name = lambda: name
        self._stats = stats

    def memory_stats(self) -> dict[str, int]:
        if isinstance(self._stats, Exception):
            raise self._stats
        return self._stats


class PyTorchGroup:
    """A ProcessGroup with a backend for GPUs, or none."""

    def __init__(self, backend: object, **attributes: object) -> None:
        self._backend = backend
        vars(self).update(attributes)

    def _get_backend(self, device: str) -> object:
        if self._backend is None:
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self._backend


STATS = {"persist": 5, "suspend": 7, "suspended": 1, "total": 12}


def test_only_groups_of_nccl_are_found() -> None:
    """Groups of Gloo, and groups without a backend for GPUs, are left out; wrappers are opened."""
    wrapped = SimpleNamespace(wrapped_pg=Backend("nccl", STATS))
    torch = torch_with(
        {
            PyTorchGroup(Backend("nccl", STATS), group_desc="tp"): "1",
            PyTorchGroup(Backend("gloo", STATS)): "2",
            PyTorchGroup(None): "3",
            PyTorchGroup(
                wrapped, group_desc="undefined", bound_device_id=SimpleNamespace(index=3)
            ): "4",
        }
    )
    found = list(process_groups(torch, 0))

    assert [(group.name, group.device) for group in found] == [("tp", 0), ("4", 3)]
    assert found[1].memory() == CommunicatorMemory(5, 7, is_suspended=True)


def test_nccl_that_does_not_count_is_no_error() -> None:
    """PyTorch raises where NCCL is too old, and has no such method before 2.12."""
    old = SimpleNamespace(name=lambda: "nccl")
    refused = Backend("nccl", RuntimeError("requires NCCL 2.29.7 or later"))
    torch = torch_with({PyTorchGroup(old): "0", PyTorchGroup(refused): "1"})

    assert [group.memory() for group in process_groups(torch, 0)] == [None, None]
    assert [group.is_ready for group in process_groups(torch, 0)] == [True, True]
    assert [group.collectives() for group in process_groups(torch, 0)] == [None, None]


def suspended_bytes(session: Session) -> int:
    """Return what the tier `communicators` has given back so far."""
    (device,) = session.lifetime.monitor.sample().devices
    return device.releases["communicators"].released_bytes


def test_the_script_suspends_and_resumes(session: Session, groups: Groups) -> None:
    """Bytes are counted as a tier of releases, and suspended ones are not on the device."""
    groups.all = [Group("tp", counted(100, 300)), Group("dp", counted(10, 20))]
    step(session)

    assert session.suspend_communicators(["tp"]) == 300 * MIB
    assert session.suspend_communicators() == 20 * MIB
    assert session.suspend_communicators() == 0
    assert suspended_bytes(session) == 320 * MIB
    tp = session.lifetime.monitor.sample().devices[0].communicators["tp"]
    assert (tp.held_bytes, tp.suspended_bytes) == (100 * MIB, 300 * MIB)
    assert session.resume_communicators() == 320 * MIB
    assert session.resume_communicators() == 0
    tp = session.lifetime.monitor.sample().devices[0].communicators["tp"]
    assert (tp.held_bytes, tp.suspended_bytes) == (400 * MIB, 0)


def test_without_nccls_support_nothing_is_suspended(
    session: Session, groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups that NCCL does not count, or that do not exist yet, are left alone, and it is said."""
    groups.all = [Group("old", None), Group("later", counted(1, 2), is_ready=False)]
    step(session)

    assert session.suspend_communicators() == 0
    assert "requires PyTorch 2.12, NCCL 2.29.7" in caplog.text
    assert groups.all[1].reads == 0


def test_nothing_suspends_by_itself(session: Session, groups: Groups) -> None:
    """No part of the SDK suspends communicators: other ranks would wait for this one."""
    groups.all = [Group("tp", counted(100, 300))]
    for _ in range(3):
        step(session)
    session.release()

    assert groups.all[0].counted == counted(100, 300)


def test_before_cuda_there_is_nothing_to_suspend(
    backend: SimulatedBackend, open_session: Callable[..., Session]
) -> None:
    """A session that has not started returns 0."""
    session = open_session(SimulatedBackend([], initialized=False))

    assert session.suspend_communicators() == session.resume_communicators() == 0
