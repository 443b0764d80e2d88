"""Bytes of the parameters, gradients, and states of all optimizers of torch.optim that stepped.

They are counted once, spread over as many steps as the budget asks for, and again when something
has changed: the numbers of parameters and states, or the gradients of a few sampled parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal
from weakref import ref

from torchmem.allocator.backend import Storages, TensorCounter
from torchmem.sdk.components.gradient_buckets import GradientBuckets
from torchmem.sdk.components.tracked import Clock, Moment
from torchmem.sdk.safety.cost import (
    CHANGE_BUDGET,
    COMPONENT_BUDGET,
    COUNT_SHARE,
    MAX_SLICE_SECONDS,
    MIN_RECOUNT_SECONDS,
    RECOUNT_SECONDS,
)

MAX_OPTIMIZERS = 4096
# Of one count, which needs about 150 bytes of memory for each parameter, gradient, and state.
MAX_MEMBERS = 3 << 17
# Optimizers, groups, and parameters that are looked at to see whether something has changed.
SAMPLES = 4
MAX_PATTERNS = 16
_CHUNK = 128

Kind = Literal["parameters", "gradients", "optimizer_state"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer_state")
Bytes = Mapping[int, int]
"""Bytes by device."""
Structure = tuple[object, ...]
"""Numbers that change with the parameters and the states."""
Pattern = tuple[bool, ...]
"""Which of the sampled parameters have a gradient."""


class Count:
    """One count of all optimizers, in slices; between them it holds no tensor."""

    def __init__(
        self,
        counter: TensorCounter,
        optimizers: Iterable[ref[Any]],
        tracked: Sequence[Storages],
        basis: tuple[Structure, Pattern],
        clock: Clock,
    ) -> None:
        self.seconds = 0.0
        self.structure, self.pattern = basis
        self._counter = counter
        self._clock = clock
        self._left = [(kind, optimizer) for kind in KINDS for optimizer in optimizers]
        self._position = self._members = 0
        self._tracked = tracked
        self._found: dict[Kind, Storages] = {kind: {} for kind in KINDS}

    def advance(self, seconds: float) -> bool:
        """Count for about this long; return whether the count is complete."""
        started = self._clock()
        while self._left and self._count_members(started + seconds):
            self._left.pop(0)
            self._position = 0
        self.seconds += self._clock() - started
        return not self._left

    def _count_members(self, end: float) -> bool:
        """Count one kind of one optimizer; return False if the time runs out before the end."""
        kind, optimizer = self._left[0]
        members = islice(_members(kind, optimizer()), self._position, None)
        count = self._counter.count_gradients if kind == "gradients" else self._counter.count
        while chunk := list(islice(members, _CHUNK)):
            if self._clock() >= end or self.is_too_large:
                return False
            count(chunk, self._found[kind])
            self._position += len(chunk)
            self._members += len(chunk)
        return True

    @property
    def gradients(self) -> Storages:
        """The storages of the gradients that were found."""
        return self._found["gradients"]

    @property
    def is_too_large(self) -> bool:
        """Whether there are more members than one count may have."""
        return self._members > MAX_MEMBERS

    def bytes(self, kind: Kind) -> Bytes:
        """Return the bytes of one kind: storages not in any earlier kind or tracked part."""
        earlier = [self._found[other] for other in KINDS[: KINDS.index(kind)]]
        return exclusive_bytes(self._found[kind], [*self._tracked, *earlier])


def _members(kind: Kind, optimizer: Any) -> Iterator[Any]:
    if optimizer is None:
        return iter(())
    return iter(optimizer.state.values()) if kind == "optimizer_state" else _parameters(optimizer)


def _parameters(optimizer: Any) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def exclusive_bytes(storages: Storages, others: Iterable[Storages]) -> Bytes:
    """Return the bytes by device of the storages that are not in any of the others."""
    totals = {}
    for device, sizes in storages.items():
        shared = {
            address for other in others for address in sizes.keys() & other.get(device, {}).keys()
        }
        totals[device] = sum(sizes.values()) - sum(sizes[address] for address in shared)
    return totals


@dataclass(frozen=True, slots=True)
class Totals:
    """The bytes that a count found, and the structure that they belong to."""

    structure: Structure
    parameters: Bytes
    optimizer_state: Bytes
    gradients: dict[Pattern, Bytes]


class Optimizers:
    """Every optimizer that stepped, as long as it lives, and the newest count of all of them."""

    def __init__(self, counter: TensorCounter, clock: Clock) -> None:
        self._counter = counter
        self._clock = clock
        self._known: dict[int, ref[Any]] = {}
        self._too_many = False
        self._thread: int | None = None
        self._count: Count | None = None
        self._totals: Totals | None = None
        self._unexplained = False
        self._slice_ended = 0.0
        self._counted = 0.0
        self._spent = 0.0
        self._gradients_due = 0.0
        self._buckets = GradientBuckets(counter)

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def is_counting(self) -> bool:
        """Whether a count has begun and is not complete."""
        return self._count is not None

    def see(self, optimizer: Any) -> None:
        """Remember an optimizer without keeping it alive; called after each of its steps."""
        known = self._known.get(id(optimizer))
        if (known is None or known() is not optimizer) and not self._too_many:
            if len(self._known) >= MAX_OPTIMIZERS:
                self._forget_dead()
            self._too_many = len(self._known) >= MAX_OPTIMIZERS
            if not self._too_many and hasattr(optimizer, "param_groups"):
                self._known[id(optimizer)] = ref(optimizer)

    def _forget_dead(self) -> None:
        self._known = {key: known for key, known in self._known.items() if known() is not None}

    def _living(self) -> list[Any]:
        return [optimizer for known in self._known.values() if (optimizer := known()) is not None]

    def read(
        self, now: float, tracked: Sequence[Storages], version: int, moment: Moment
    ) -> dict[str, Bytes] | None:
        """Return the known bytes of parameters, optimizer state, and gradients; None if uncounted.

        `now` is a time of the clock. `tracked`: storages that are not counted here; `version`
        changes with the parts that they belong to.
        """
        structure = self._structure(version)
        if moment == "step":
            self._thread = threading.get_ident()
            self._buckets.look(now, self._sampled_parameters(), self._all_parameters)
            pattern = self._pattern()
            self._advance(now, tracked, structure, pattern)
        totals = self._totals
        if self._too_many or totals is None or totals.structure != structure:
            return None
        counted = {"parameters": totals.parameters, "optimizer_state": totals.optimizer_state}
        if moment == "step":
            counted |= self._gradients(totals, pattern, now, tracked)
        elif self._can_look_at_gradients(moment):
            counted["gradients"] = self._gradients_now(tracked)
        return counted

    def _advance(
        self, now: float, tracked: Sequence[Storages], structure: Structure, pattern: Pattern
    ) -> None:
        """Begin or continue a count; drop one if what it is based on has changed."""
        count = self._count
        if count and (structure, pattern) != (count.structure, count.pattern):
            self._end_count(now, count)
        if self._count is None and not self._too_many and self._is_due(now, structure):
            optimizers = tuple(self._known.values())
            basis = structure, pattern
            self._count = Count(self._counter, optimizers, tracked, basis, self._clock)
        if self._count:
            self._take_slice(now, self._count)

    def _structure(self, version: int) -> Structure:
        living = self._living()
        sampled = [_numbers(optimizer) for optimizer in _sampled(living)]
        return version, len(living), *sampled

    def _pattern(self) -> Pattern:
        return self._counter.have_gradients(self._sampled_parameters())

    def _sampled_parameters(self) -> list[Any]:
        sampled = [_sampled_parameters(optimizer) for optimizer in _sampled(self._living())]
        return list(chain.from_iterable(sampled))

    def _all_parameters(self) -> Iterator[Any]:
        return chain.from_iterable(map(_parameters, self._living()))

    def _is_due(self, now: float, structure: Structure) -> bool:
        """Return whether a count may begin; the first one and one after a change do not wait."""
        if self._totals is None or self._totals.structure != structure:
            return now >= self._counted + self._spent / CHANGE_BUDGET
        pause = MIN_RECOUNT_SECONDS if self._unexplained else RECOUNT_SECONDS
        return now >= self._counted + max(pause, self._spent / COMPONENT_BUDGET)

    def _take_slice(self, now: float, count: Count) -> None:
        share = COUNT_SHARE * (now - self._slice_ended)
        is_complete = count.advance(min(MAX_SLICE_SECONDS, share))
        self._slice_ended = now
        self._too_many = self._too_many or count.is_too_large
        if is_complete or self._too_many:
            self._buckets.add(count.gradients)
            parameters, gradients, state = map(count.bytes, KINDS)
            self._totals = Totals(count.structure, parameters, state, {count.pattern: gradients})
            self._unexplained = False
            self._end_count(now, count)

    def _end_count(self, now: float, count: Count) -> None:
        self._count = None
        self._counted, self._spent = now, count.seconds

    def _gradients(
        self, totals: Totals, pattern: Pattern, now: float, tracked: Sequence[Storages]
    ) -> dict[str, Bytes]:
        """Return the bytes of the gradients at a step's end, unless they are unknown.

        The same sampled parameters with a gradient mean the same bytes, until `recount`.
        """
        known = totals.gradients.get(pattern)
        return self.recount(now, tracked) if known is None else {"gradients": known}

    def recount(self, now: float, tracked: Sequence[Storages]) -> dict[str, Bytes]:
        """Count the gradients at a step's end once more, if the budget allows.

        Something has changed that does not show in the structure.
        """
        if self._totals is None or now <= self._counted or now < self._gradients_due:
            return {}
        self._unexplained = True
        known = self._totals.gradients
        if len(known) >= MAX_PATTERNS:
            known.clear()
        found = known[self._pattern()] = self._gradients_now(tracked)
        self._gradients_due = now + (self._clock() - now) / COMPONENT_BUDGET
        return {"gradients": found}

    def _gradients_now(self, tracked: Sequence[Storages]) -> Bytes:
        found: Storages = {}
        self.add_gradients(found)
        return exclusive_bytes(found, tracked)

    def add_gradients(self, found: Storages, optimizer: Any = None) -> None:
        """Add the storages of the gradients that exist, of one optimizer or of all, and buckets."""
        for one in self._living() if optimizer is None else [optimizer]:
            self._counter.count_gradients(_parameters(one), found)
        self._buckets.add(found)

    def all_gradients(self, now: float, tracked: Sequence[Storages]) -> Bytes | None:
        """Return the bytes of all gradients before the step of the only optimizer.

        None if there are several, because not all their gradients exist at the same time.
        """
        if self._totals is None or len(self._known) != 1:
            return None
        return self._gradients(self._totals, self._pattern(), now, tracked).get("gradients")

    def _can_look_at_gradients(self, moment: Moment) -> bool:
        """Return whether no other thread can be writing gradients.

        In an OOM on a script's only device, this thread writes them, or the writing thread waits.
        """
        if self._totals and moment == "oom" and len(self._totals.parameters) <= 1:
            return True
        return self._thread == threading.get_ident() and self._buckets.is_current


def _sampled(values: list[Any]) -> list[Any]:
    """Return the first and the last of many values, and some between them."""
    if len(values) <= SAMPLES:
        return values
    return [values[index * (len(values) - 1) // (SAMPLES - 1)] for index in range(SAMPLES)]


def _numbers(optimizer: Any) -> tuple[int, int, int]:
    groups = optimizer.param_groups
    parameters = sum(len(group["params"]) for group in _sampled(groups))
    return len(groups), parameters, len(optimizer.state)


def _sampled_parameters(optimizer: Any) -> Iterator[Any]:
    for group in _sampled(optimizer.param_groups):
        # Of each group, the first and the last.
        yield from _sampled(group["params"])[:: SAMPLES - 1]
