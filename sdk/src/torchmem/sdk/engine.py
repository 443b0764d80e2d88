"""An inference engine in this process: its memory awake and asleep, its plan, and its sleeps.

An integration describes the engine with an `EngineSource` and says when its memory changes. While
an engine waits for requests, its process may run no bytecode, so that nothing could be read later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torchmem.explain.growth import MEASURED_EXACTLY, MIN_POINTS, judge_growth
from torchmem.explain.serving import SPARE_BYTES, awake_cache
from torchmem.sample.engine import MAX_RESIDUALS, Engine
from torchmem.sdk.draft import Draft
from torchmem.sdk.oom.ending import FailedWakeUp, LibraryOom
from torchmem.sdk.part import Part
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.errors import Stage

MIN_STEPS = 1000
"""With fewer steps, the peaks say little about the requests to come."""
SPARE_ACTIVATIONS = 0.1
"""The share by which later activations may exceed those seen so far."""


@dataclass(frozen=True, slots=True)
class EngineAllocation:
    """Memory of an allocator of the engine's own: where it is, and whether it was given back."""

    address: int
    size: int
    part: str
    is_asleep: bool


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine planned at its start, in bytes; None where it did not say.

    budget: what it may use in all.
    consumed: what it used for other things than the KV cache, activations and graphs.
    """

    parts: Mapping[str, int]
    budget: int | None = None
    consumed: int | None = None


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """What the names of an engine's parts mean.

    within: for a part that the engine's own allocator holds under another name, that name.
    deferrable: parts of the allocator that wake up only when they are asked for; all others always
        do.
    planned: the parts, besides the activations, whose sizes the plan can be compared with.
    """

    within: Mapping[str, str]
    deferrable: Collection[str]
    planned: Collection[str]


class EngineSource(Protocol):
    """What an integration knows of an engine. It is called in the engine's thread."""

    name: str
    terms: EngineTerms
    is_alone: bool
    """Whether nothing else in this process, such as a trainer, allocates on the device."""

    @property
    def device(self) -> int:
        """Torch's index of the device."""

    def allocations(self) -> Iterable[EngineAllocation]:
        """Return what the engine's own allocator holds; nothing if it has none."""

    def parts(self) -> Mapping[str, int]:
        """Return the bytes of parts that PyTorch's allocator or the one above holds."""

    def plan(self) -> EnginePlan:
        """Return the plan, once the engine is ready."""


class EnginePart(Part):
    """Knows the engine of this process, and publishes its memory.

    `is_moving`: it falls asleep or wakes up. `waking`: the parts that the latest wake-up was to
    wake; None stands for all.
    """

    stage: Stage = "engine"

    def __init__(
        self, recorder: Recorder, steps: Callable[[], int], reset_peaks: Callable[[], None]
    ) -> None:
        """`steps` returns the count of steps, `reset_peaks` starts a new window of the peaks."""
        self._recorder = recorder
        self._steps = steps
        self._reset_peaks = reset_peaks
        self.source: EngineSource | None = None
        self.is_moving = False
        self.waking: frozenset[str] | None = None
        self._engine: Engine | None = None
        self._plan: EnginePlan | None = None
        self._resting = 0
        self._ready_steps = 0
        self._sleeps = 0
        self._residuals: tuple[int, ...] = ()
        self._residual_growth: float | None = None
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def asleep_bytes(self) -> int:
        """What the engine takes from the driver when it wakes up."""
        return self._engine.asleep_bytes if self._engine else 0

    def asleep_of(self, parts: Iterable[str] | None = None) -> int:
        """Return what it takes when only some parts wake up; None stands for all."""
        if self._engine is None or self.source is None:
            return 0
        terms = self.source.terms
        left = () if parts is None else set(terms.deferrable) - set(parts)
        asleep = self._engine.asleep
        return sum(asleep[part] for part in asleep if terms.within.get(part, part) not in left)

    @property
    def note(self) -> str | None:
        """What the engine holds that no other process can get, in one sentence."""
        return awake_cache(self._engine.resident) if self._engine else None

    @property
    def device(self) -> int | None:
        """Torch's index of the engine's device."""
        return self.source.device if self.source else None

    def failed_wake_up(self, oom: LibraryOom) -> LibraryOom:
        """Return a failed allocation as that of a wake-up, if anything still sleeps."""
        device, asleep = self.device, self.asleep_bytes
        if device is None or not asleep:
            return oom
        missing = self.asleep_of(self.waking)
        return replace(oom, requested=missing, wake_up=FailedWakeUp(device, asleep))

    def is_asleep(self, address: int) -> bool:
        """Return whether the memory at an address was given back to the driver."""
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]

    def changed(self) -> None:
        """Ask the engine what it holds now, before the statistics are read."""
        if self.source is None:
            return
        allocations = list(self.source.allocations())
        asleep = sorted((each.address, each.size) for each in allocations if each.is_asleep)
        self._starts = [address for address, _ in asleep]
        self._ends = [address + size for address, size in asleep]
        resident, gone = divided(allocations, self.source.parts(), self.source.terms.within)
        self._engine = Engine(self.source.name, resident, gone)
        self._recorder.components.is_asleep = self.is_asleep if self.asleep_bytes else None

    def slept(self) -> None:
        """Note what stayed after a sleep, when the statistics were read after it."""
        record = self._record()
        if record is not None and self.asleep_bytes:
            self._sleeps += 1
            left = max(0, record.reserved_bytes() - self.asleep_bytes)
            self._residuals = (*self._residuals, left)[-MAX_RESIDUALS:]
            self._residual_growth = residual_growth(self._residuals)

    def ready(self) -> None:
        """Note that the engine serves from now on, after the statistics were read."""
        record, source = self._record(), self.source
        if source is None or record is None or record.allocator is None:
            return
        if source.is_alone:
            self._reset_peaks()
            record.watched_peak = 0
        self._plan, self._ready_steps = source.plan(), self._steps()
        self._resting = record.allocator.allocated_bytes.total

    def complete(self, sample: Draft) -> None:
        """Add the engine to its device."""
        record = self._record()
        if record is None:
            return
        engine = self._published(record.watched_peak, self._steps())
        for device in sample.devices:
            if device.index == self.device:
                device.add(engine=engine)

    def _record(self) -> DeviceRecord | None:
        """Return the record of the engine's device."""
        return None if self.device is None else self._recorder.records().get(self.device)

    def _published(self, peak: int | None, steps: int) -> Engine | None:
        """Return the engine as it is published. `peak`: of the allocated bytes since `ready`."""
        known, plan = self._engine, self._plan
        if known is None:
            return None
        peaks = {}
        if plan is not None and peak is not None and self.source is not None:
            activations = max(0, peak - self._resting)
            peaks = actual_peaks(known, activations, self.source.terms.planned)
        served = steps - self._ready_steps
        advice = kv_cache_advice(plan, peaks) if plan and served >= MIN_STEPS else None
        return Engine(
            known.name,
            known.resident,
            known.asleep,
            dict(plan.parts) if plan else {},
            peaks,
            advice,
            self._sleeps,
            self._residuals,
            self._residual_growth,
        )


def residual_growth(left: Sequence[int]) -> float | None:
    """Return by how much each sleep leaves more than the one before, in bytes.

    0 if that does not grow; None after too few sleeps.
    """
    if len(left) < MIN_POINTS:
        return None
    growth = judge_growth("kept", list(enumerate(left)), MEASURED_EXACTLY)
    return growth.bytes_per_step if growth else 0.0


def divided(
    allocations: Iterable[EngineAllocation], parts: Mapping[str, int], within: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes by part that are on the device, and those that are asleep.

    What the engine's own allocator holds counts under its name there; of that, the parts in
    `within` count by themselves. Other parts count where no allocation has their name.
    """
    resident: dict[str, int] = {}
    asleep: dict[str, int] = {}
    for each in allocations:
        into = asleep if each.is_asleep else resident
        into[each.part] = into.get(each.part, 0) + each.size
    own = resident.keys() | asleep.keys()
    resident |= {name: size for name, size in parts.items() if name not in {*own, *within} and size}
    for name, whole in within.items():
        size = parts.get(name, 0)
        sizes = asleep if asleep.get(whole, 0) >= size > 0 else resident
        if size and sizes.get(whole, 0) >= size:
            sizes[whole] -= size
            sizes[name] = size
    return resident, asleep


def actual_peaks(engine: Engine, activations: int, parts: Iterable[str]) -> dict[str, int]:
    """Return the peaks in the terms of the plan: of the activations, and the size of each part."""
    whole = {name: engine.resident.get(name, 0) + engine.asleep.get(name, 0) for name in parts}
    return {"activations": activations} | {name: size for name, size in whole.items() if size}


def kv_cache_advice(plan: EnginePlan, peaks: Mapping[str, int]) -> int | None:
    """Return how large the KV cache can be within the budget, with a margin.

    vLLM computes its own suggestion in the same way, from the profile run's activations instead of
    the actual ones (v1/worker/gpu_worker.py, `kv_cache_memory_bytes_to_requested_limit`).
    """
    if plan.budget is None or plan.consumed is None or "activations" not in peaks:
        return None
    activations = peaks["activations"]
    spare = SPARE_BYTES + int(SPARE_ACTIVATIONS * activations)
    left = plan.budget - plan.consumed - peaks.get("cudagraph", 0) - activations - spare
    return left if left > 0 else None
