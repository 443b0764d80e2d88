"""A process that allocates nothing takes no further snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.waiting import until

from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.sample import Layout
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

MIB = 1 << 20


class Counting(SimulatedBackend):
    """Counts its snapshots."""

    def __init__(self, allocators: Sequence[DeviceCachingAllocator]) -> None:
        super().__init__(allocators)
        self.snapshots = 0

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Count one more."""
        self.snapshots += 1
        return super().memory_snapshot()


def layout(session: Session) -> Layout | None:
    """Return the layout that was published last."""
    return session.newest.devices[0].layout if session.newest and session.newest.devices else None


def is_newer(session: Session, earlier: Layout) -> bool:
    """Return whether the published layout is of a later time."""
    now = layout(session)
    return now is not None and now.timestamp > earlier.timestamp


def test_a_snapshot_holds_until_something_is_allocated(
    allocator: DeviceCachingAllocator, open_session: Callable[..., Session]
) -> None:
    """The layout of an idle process stays up to date without a snapshot, until a block changes."""
    kept = allocator.malloc(3 * MIB)
    backend = Counting([allocator])
    session = open_session(backend, interval=0.01, snapshot_interval=0.01, snapshot_budget=1.0)
    until(lambda: layout(session) is not None)
    first, taken = layout(session), backend.snapshots
    assert first is not None
    until(lambda: is_newer(session, first))
    second = layout(session)
    assert second is not None
    unchanged = backend.snapshots - taken

    allocator.free(kept)
    until(lambda: backend.snapshots > taken + unchanged)
    until(lambda: (now := layout(session)) is not None and now.free_bytes > second.free_bytes)

    assert unchanged == 0
    assert second.free_bytes == first.free_bytes
    assert sum(session.errors.counts.values()) == 0
