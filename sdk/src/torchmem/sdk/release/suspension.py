"""Suspending NCCL's communicators, which only the script can ask for: every rank must take part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from torchmem.allocator.backend import Backend
from torchmem.allocator.process_groups import CommunicatorMemory, ProcessGroup
from torchmem.sdk.release.account import timed
from torchmem.sdk.release.device_release import DeviceReleases
from torchmem.sdk.safety.errors import log

Counted = tuple[ProcessGroup, int, CommunicatorMemory]
"""A group, its device, and what NCCL counts."""


class Suspension:
    """Suspends and resumes the communicators of this process in the order of their creation.

    That is the same on every rank. `make_room` empties caches until the driver has these bytes free
    on a device, and `read` reads what the communicators hold afterwards.
    """

    def __init__(
        self,
        backend: Backend,
        devices: DeviceReleases,
        make_room: Callable[[int, int], None],
        read: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._devices = devices
        self._make_room = make_room
        self._read = read

    def suspend(self, names: Collection[str] | None) -> int:
        """Suspend groups by name, all by default; return the bytes given back to the driver."""
        groups = [each for each in self._counted(names) if not each[2].is_suspended]
        freed: dict[int, int] = {}
        known = self._devices.by_index()
        accounts = {index: known[index].account("communicators") for _, index, _ in groups}
        with timed(list(accounts.values())):
            for group, index, memory in groups:
                group.suspend()
                freed[index] = freed.get(index, 0) + memory.suspendable
        for index, size in freed.items():
            accounts[index].add(size)
        self._read()
        return sum(freed.values())

    def resume(self, names: Collection[str] | None) -> int:
        """Resume groups, likewise; return the bytes taken from the driver again."""
        groups = [each for each in self._counted(names) if each[2].is_suspended]
        wanted: dict[int, int] = {}
        for _, index, memory in groups:
            wanted[index] = wanted.get(index, 0) + memory.suspendable
        for index, size in wanted.items():
            self._make_room(size, index)
        for group, _, _ in groups:
            group.resume()
        self._read()
        return sum(wanted.values())

    def _counted(self, names: Collection[str] | None) -> Sequence[Counted]:
        """Return the groups with these names that can be suspended.

        All ranks run the same versions of PyTorch and NCCL, so all leave out the same groups.
        """
        devices = self._devices.by_index()
        found: list[Counted] = []
        for group in self._backend.process_groups():
            is_meant = names is None or group.name in names
            memory = group.memory() if is_meant and group.is_ready else None
            if memory is not None and group.device is not None and group.device in devices:
                found.append((group, group.device, memory))
        if not found:
            log(
                logging.WARNING,
                "No communicators to suspend or resume. This requires PyTorch 2.12, NCCL 2.29.7, "
                "and an NCCL process group that has run a collective.",
            )
        return found
