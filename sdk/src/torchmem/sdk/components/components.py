"""What holds the active bytes: parameters, gradients, optimizer state, and the rest.

A read costs microseconds if nothing has changed. The structure of the optimizers and `held` show
whether the counts are still valid: in training, `held` is exactly the same after every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchmem.allocator.backend import Modules, Storages, TensorCounter
from torchmem.sample.sample import ASLEEP, Allocator
from torchmem.sdk.components.modules import ModuleParameters
from torchmem.sdk.components.optimizers import Bytes, Optimizers, exclusive_bytes
from torchmem.sdk.components.tracked import Clock, Moment, Tracked
from torchmem.sdk.safety.errors import Errors

Allocators = Mapping[int, Allocator]
"""Statistics by device."""
Counted = Mapping[str, Bytes]
"""Bytes by component and device."""
Values = dict[str, int]
"""Bytes by component."""


class Components:
    """Keeps the counts of one process; `read` is called with each read of the statistics.

    `is_asleep` returns whether an engine has given the memory at an address back to the driver;
    None while no engine sleeps.
    """

    def __init__(
        self,
        counter: TensorCounter | None,
        errors: Errors,
        clock: Clock = time.perf_counter,
        modules: Modules | None = None,
        cpu_clock: Clock = time.thread_time,
    ) -> None:
        self.tracked = Tracked(counter, errors, cpu_clock)
        self.is_asleep: Callable[[int], bool] | None = None
        self._errors = errors
        self._clock = clock
        self._optimizers = None if counter is None else Optimizers(counter, clock)
        self._modules: ModuleParameters | None = None
        if counter is not None and modules is not None:
            self._modules = ModuleParameters(modules, counter, clock)
        self._held: dict[int, int] = {}
        self._held_version = 0

    def track(self, name: str, tensors: Any) -> None:
        """Count these tensors as a separate component; None stops it."""
        self.tracked.set(name, tensors)

    def see(self, optimizer: Any) -> None:
        """Remember an optimizer; called after each of its steps."""
        if self._optimizers is not None:
            try:
                self._optimizers.see(optimizer)
            except Exception as error:
                if self._errors.passes("components", error):
                    raise

    def read(self, allocators: Allocators, moment: Moment) -> dict[int, Values]:
        """Return the bytes of each component by device; they add up to the active bytes.

        Devices with unknown bytes are missing. `allocators` must be from this moment.
        """
        now = self._clock()
        parts = self.tracked.count(now, moment)
        tracked = tuple(parts.values())
        counted = _part_bytes(_without_asleep(parts, self.is_asleep))
        if self._optimizers:
            known = self._optimizers.read(now, tracked, self.tracked.version, moment)
            if known is None:
                return {}
            counted |= known
        elif self._modules and not self.tracked.parts:
            parameters = self._modules.read(now, may_count=moment != "oom")
            counted |= {} if parameters is None else {"parameters": parameters}
        if not counted:
            return {}
        if moment == "step":
            return self._at_step(now, allocators, counted, tracked)
        return self._between_steps(allocators, counted)

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer that still exists has stepped."""
        return bool(self._optimizers)

    @property
    def is_counting(self) -> bool:
        """Whether a count is spread over the next reads."""
        return self._optimizers is not None and self._optimizers.is_counting

    def add_gradients(self, found: Storages, optimizer: object = None) -> None:
        """Add the storages of the gradients that exist, of one optimizer or of all."""
        if self._optimizers is not None:
            self._optimizers.add_gradients(found, optimizer)

    def all_gradients(self) -> Bytes | None:
        """Return the bytes of all gradients before the step of the only optimizer, else None."""
        if self._optimizers is None:
            return None
        now = self._clock()
        return self._optimizers.all_gradients(now, tuple(self.tracked.storages()))

    def _at_step(
        self,
        now: float,
        allocators: Allocators,
        counted: dict[str, Bytes],
        tracked: Sequence[Storages],
    ) -> dict[int, Values]:
        held = self._rest(allocators, counted)
        if self._optimizers and held != self._held:
            counted |= self._optimizers.recount(now, tracked)
            held = self._rest(allocators, counted)
        if self._optimizers and "gradients" not in counted:
            return {}
        self._held, self._held_version = held, self.tracked.version
        return _completed(allocators, counted, {"held": held})

    def _between_steps(self, allocators: Allocators, counted: Counted) -> dict[int, Values]:
        """Add what lives between steps, as at the end of the latest one, and what came since.

        Without any step so far, the two cannot be told apart and count as `held`.
        """
        rest = self._rest(allocators, counted)
        if not self._held and not self._optimizers:
            return _completed(allocators, counted, {"held": rest})
        if self._held_version != self.tracked.version:
            return {}
        lasting = {
            device: min(rest[device], self._held[device]) for device in rest.keys() & self._held
        }
        since = {device: rest[device] - lasting[device] for device in lasting}
        is_split = not self._optimizers or "gradients" in counted
        name = "step" if is_split else "gradients_or_step"
        return _completed(allocators, counted, {"held": lasting, name: since})

    def _rest(self, allocators: Allocators, counted: Counted) -> dict[int, int]:
        """Return the requested bytes of tensors that are not counted, without unknown ones.

        The bytes are known to within the rounding of pending blocks. Those closest to the latest
        `held` are taken, which does not change in training.
        """
        rest = {}
        for device, allocator in allocators.items():
            known = sum(values.get(device, 0) for values in counted.values())
            least, most = _uncounted(allocator, known)
            if least <= most:
                rest[device] = min(max(self._held.get(device, least), least), most)
        return rest


def _without_asleep(
    parts: Mapping[str, Storages], is_asleep: Callable[[int], bool] | None
) -> Mapping[str, Storages]:
    """Return the parts with the storages that are asleep in a part of their own."""
    if is_asleep is None:
        return parts
    awake: dict[str, Storages] = {name: {} for name in parts}
    asleep: Storages = {}
    for name, storages in parts.items():
        for device, sizes in storages.items():
            for address, size in sizes.items():
                into = asleep if is_asleep(address) else awake[name]
                into.setdefault(device, {})[address] = size
    return {**awake, ASLEEP: asleep}


def _part_bytes(parts: Mapping[str, Storages]) -> dict[str, Bytes]:
    """Return the bytes of each tracked part; memory in several parts counts as the first one."""
    counted: dict[str, Bytes] = {}
    earlier: list[Storages] = []
    for name, storages in parts.items():
        counted[name] = exclusive_bytes(storages, earlier)
        earlier.append(storages)
    return counted


def _uncounted(allocator: Allocator, counted: int) -> tuple[int, int]:
    """Return bounds of the allocated bytes that are requested and not counted.

    PyTorch counts a freed block that waits for another stream in the requested and in the active
    bytes, but not in the allocated ones; how much of the block was requested is unknown. The bounds
    contradict each other if more is counted than allocated, as with tensors that are not in the
    allocator's memory, and if the statistics are impossible.
    """
    allocated, active = allocator.allocated_bytes.total, allocator.active_bytes.total
    requested = active if allocator.requested_bytes is None else allocator.requested_bytes.total
    if not 0 <= allocated <= active:
        return 1, 0
    return max(0, requested - (active - allocated) - counted), min(requested, allocated) - counted


def _completed(allocators: Allocators, counted: Counted, rest: Counted) -> dict[int, Values]:
    """Return all components of the devices that `rest` is known for, with pending and rounding."""
    completed = {}
    for device in rest["held"]:
        allocator = allocators[device]
        allocated, active = allocator.allocated_bytes.total, allocator.active_bytes.total
        values = {name: by_device.get(device, 0) for name, by_device in {**counted, **rest}.items()}
        if allocator.requested_bytes is not None:
            values["rounding"] = allocated - sum(values.values())
        if active > allocated:
            values["pending"] = active - allocated
        completed[device] = values
    return completed
