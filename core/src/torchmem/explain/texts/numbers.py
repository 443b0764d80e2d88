"""The numbers of a message, in bytes, as far as it says them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from torchmem.explain.texts.formats import Clause, TextFormat

MAX_BYTES = 1 << 50
"""PyTorch writes 17179869184.00 GiB, which is 2^64 bytes, for a number that is not available."""
MAX_HOLDERS = 64
_UNITS = {"b": 1, "bytes": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SUFFIXES = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on the GPU, as a message lists it; `pid` is None for the process itself."""

    pid: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a message says, in bytes; None if it does not.

    Attributes:
        requested: the request that failed.
        total: memory of the GPU.
        free: free memory at the driver.
        allocated: tensors of this process, and `private`.
        reserved: what its allocator had taken from the driver.
        unallocated: what it had taken and not given to tensors.
        private: free blocks in the pools of CUDA graphs and MemPools, which `allocated` contains.
        allowed: what the memory fraction, or another limit of the program's own, lets it take.
        available: what an engine found for its KV cache.
        before: free memory at an earlier moment.
        other: memory of the process outside the allocator (MPS).
        resident: host memory of a killed process.
        fraction: the share of the GPU that an engine may use.
        tokens: the longest sequence that would fit, by the engine's estimate.
        gpu: the process's index of the GPU.
        pid: the process that was killed.
        program: its name.
        library: the library, by the prefix of its status.
        backend: CUDA, HIP, XPU or MUSA.
        holders: the processes that are listed.
    """

    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    unallocated: int | None = None
    private: int | None = None
    allowed: int | None = None
    available: int | None = None
    before: int | None = None
    other: int | None = None
    resident: int | None = None
    fraction: float | None = None
    tokens: int | None = None
    gpu: int | None = None
    pid: int | None = None
    program: str | None = None
    library: str | None = None
    backend: str | None = None
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """A message in a text: `text[start:end]`.

    `is_whole` is whether nothing of it is missing: a number that is None was not in it.
    `is_joined` is whether it is of several lines, of which one may be lost.
    """

    format: TextFormat
    numbers: Numbers
    start: int
    end: int
    is_whole: bool
    is_joined: bool = False


_PLAIN = {"gpu": int, "pid": int, "tokens": int, "fraction": float}
_WORDS = {"program", "library", "backend"}
_SIZES = {each.name for each in fields(Numbers)} - _PLAIN.keys() - _WORDS - {"holders"}
_ALIASES = {"task": "program", "task_pid": "pid"}


@dataclass(slots=True)
class _Found:
    """The groups that were found so far."""

    values: dict[str, object] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)

    def add(self, match: re.Match[str]) -> None:
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        held = groups.pop("holds", None)
        if held is not None:
            pid = groups.pop("pid", None)
            holder = Holder(int(pid) if pid else None, size_of(held))
            self.holders.append(holder)
        self.values.update(_values(groups))

    def numbers(self) -> Numbers:
        return Numbers(holders=tuple(self.holders[:MAX_HOLDERS]), **self.values)  # type: ignore[arg-type]


def _values(groups: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for group, text in groups.items():
        name = _ALIASES.get(group, group)
        stem, _, unit = name.rpartition("_")
        if name in _WORDS:
            yield name, text
        elif name in _PLAIN:
            yield name, _PLAIN[name](text)
        elif unit in _SUFFIXES:
            yield stem, _bounded(float(text.replace(",", "")) * _SUFFIXES[unit])
        else:
            yield name, size_of(text)


def size_of(text: str) -> int | None:
    """Return the bytes of a size such as "1.50 GiB"; None if it stands for no number.

    PyTorch divides by 1024 also where it writes "GB".
    """
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", text.strip()).groups()  # type: ignore[union-attr]
    key = unit.lower()
    return _bounded(float(number) * _UNITS.get(key, _UNITS.get(key[0], 1)))


def _bounded(value: float) -> int | None:
    return round(value) if 0 <= value < MAX_BYTES else None


def read_message(known: TextFormat, match: re.Match[str], text: str) -> Message:
    """Return the message that begins with `match`, which is of the pattern of `known`."""
    head = _Found()
    head.add(match)
    best, end, is_whole = head, match.end(), not known.chains
    for chain in known.chains:
        found, reached, ended = _follow(chain, text, match.end(), head)
        if reached > end:
            best, end, is_whole = found, reached, ended
    return Message(known, best.numbers(), match.start(), end, is_whole)


def _follow(chain: Sequence[Clause], text: str, at: int, head: _Found) -> tuple[_Found, int, bool]:
    """Return what a chain of clauses says from `at` on, where it breaks, and whether it ended."""
    found = _Found(dict(head.values), list(head.holders))
    for clause in chain:
        pattern, count = re.compile(clause.pattern), 0
        match = pattern.match(text, at)
        while match and (count == 0 or clause.repeats):
            found.add(match)
            at, count = match.end(), count + 1
            match = pattern.match(text, at)
        if clause.is_required and not count:
            return found, at, False
        if clause.ends:
            return found, at, True
    return found, at, False
