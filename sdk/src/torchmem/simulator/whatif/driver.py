"""A driver that answers as the one in the recording did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from torchmem.simulator.card import CardUse, SimulatedCard
from torchmem.simulator.recording.trace import Event

ENDLESS_BYTES = 1 << 40
"""More than any card has: stands for one of unknown size."""
NOBODYS_ADDRESS = 1 << 47
"""User addresses of Linux end here, so that no recorded address is met."""
GIVEN = frozenset({"segment_alloc", "segment_map"})
TAKEN = frozenset({"segment_free", "segment_unmap"})


class _EndlessUse(CardUse):
    """Counts bytes and refuses none: whether there was room the recording knows."""

    def claim(self, size: int, capacity: int) -> bool:
        """Add `size` bytes."""
        return super().claim(size, capacity + self.total() + size)


class RecordedCard(SimulatedCard):
    """Gives the recorded addresses, and refuses where memory had to go back first.

    `total_bytes` only decides how long the address ranges of expandable segments are.
    `expected` are the driver's next events, up to the request at hand; `fails`: that request failed. Asked for anything
    else it gives an address of its own. `later` gives what is mapped from now on for the stream and pool at hand,
    `ranges` are the address ranges that are reserved already.
    """

    def __init__(self, total_bytes: int = ENDLESS_BYTES) -> None:
        super().__init__(total_bytes, context_bytes=0, use=_EndlessUse())
        self.expected: deque[Event] = deque()
        self.fails = False
        self.driver_free: int | None = None
        self.later: Callable[[], Iterator[Event]] = lambda: iter(())
        self.ranges: list[range] = []
        self._next_address = NOBODYS_ADDRESS

    def cuda_malloc(self, size: int) -> int | None:
        """The next recorded segment of this size; None where the recorded driver refused."""
        if self._refuses():
            return None
        event = self.expected[0] if self.expected else None
        if event is None or event.action != "segment_alloc" or event.size != size:
            return self._own_segment(size)
        self.expected.popleft()
        self.adopt(event.address, size)
        return event.address

    def mem_create(self, size: int) -> bool:
        """Whether the recorded driver gave memory now."""
        if self._refuses():
            return False
        if self.expected and self.expected[0].action == "segment_map" and self.expected[0].size == size:
            self.expected.popleft()
        return super().mem_create(size)

    def reserve_addresses(self, size: int) -> int:
        """Where memory is mapped now; if it is not, where it is later, in no address range so far."""
        now = (event.address for event in self.expected if event.action == "segment_map")
        outside = (event.address for event in self.later() if not any(event.address in known for known in self.ranges))
        address = next(now, None) or next(outside, None)
        if address is None:
            address = super().reserve_addresses(size)
        self.ranges.append(range(address, address + size))
        return address

    def cuda_free(self, address: int) -> None:
        """Take the segment back, and wait for it no longer."""
        super().cuda_free(address)
        self._drop(lambda event: event.action == "segment_free" and event.address == address)

    def mem_unmap(self, size: int) -> None:
        """Take pages back, and wait for them no longer."""
        super().mem_unmap(size)
        self._drop(lambda event: event.action == "segment_unmap" and event.size == size)

    def mem_get_info(self) -> tuple[int, int]:
        """Free bytes as the failed request's event tells them."""
        free, total = super().mem_get_info()
        return (free if self.driver_free is None else self.driver_free), total

    def _own_segment(self, size: int) -> int:
        address = super().reserve_addresses(size)
        self.adopt(address, size)
        return address

    def _refuses(self) -> bool:
        return self.expected[0].action in TAKEN if self.expected else self.fails

    def _drop(self, matches: Callable[[Event], bool]) -> None:
        found = next((event for event in self.expected if matches(event)), None)
        if found is not None:
            self.expected.remove(found)
