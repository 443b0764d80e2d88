"""Who holds the memory of a GPU that should not: as records, and as notes in words.

Only NVML and /proc together know it, so a node without an exporter that sees the node's processes
has no notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchmem.allocator.sizes import format_size
from torchmem.node.state import GpuNote
from torchmem.output.terminal import counted, first_of
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind
from torchmem.sample.sample import Process

MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class DeadProcess:
    """A process that is gone, and the bytes that NVML says it holds on a GPU.

    `facts`: labels of `nvml_process_info` that were known of it, such as its user, run and rank.
    """

    pid: int
    bytes: int
    facts: Mapping[str, str] = field(default_factory=dict)

    def was(self, process: Process) -> bool:
        """Return whether it was of another launch of a process's run, by the same user."""
        launch, other = self.facts.get("launch"), process.launch
        if launch is None or other is None or self.facts.get("run") != process.run:
            return False
        return launch != other and launch.partition("-")[0] == other.partition("-")[0]


@dataclass(frozen=True, slots=True)
class GpuHolders:
    """What is known of the processes on the GPUs of a node.

    `held`: NVML's bytes of each process, by the device's UUID or name and the pid. `dead`: the
    processes that are gone and still hold memory, by the GPU's UUID, those with most bytes first.
    """

    held: Mapping[tuple[str, int], int] = field(default_factory=dict)
    dead: Mapping[str, Sequence[DeadProcess]] = field(default_factory=dict)


def gpu_notes(holders: GpuHolders, uuid: str) -> tuple[GpuNote, ...]:
    """Return the notes about a GPU."""
    return tuple(_dead(holders.dead.get(uuid, ())))


def _dead(dead: Sequence[DeadProcess]) -> Iterator[GpuNote]:
    if dead:
        held = format_size(sum(process.bytes for process in dead))
        which = counted(len(dead), "process", "processes")
        verb = "is" if len(dead) == 1 else "are"
        names = first_of(list(map(_name, dead)), MAX_NAMED)
        yield _note("dead_processes", f"{held} is held by {which} that {verb} gone: {names}.")


def _note(kind: RemedyKind, text: str) -> GpuNote:
    return GpuNote(kind, text, f"{REMEDY_WORDS[kind]}.")


def _name(dead: DeadProcess) -> str:
    """Return the pid, and who it was as far as that is known."""
    facts = dead.facts
    rank = f"rank {facts['rank']} of run {facts.get('run')}" if "rank" in facts else None
    uid = f"user ID {facts['uid']}" if "uid" in facts else None
    known = ", ".join(filter(None, (rank or facts.get("name"), facts.get("user") or uid)))
    return f"pid {dead.pid} ({known})" if known else f"pid {dead.pid}"


def previous_launch(holders: GpuHolders, uuid: str, process: Process) -> str | None:
    """Return what an earlier launch of a process's run left on a GPU; None for nothing."""
    left = [dead for dead in holders.dead.get(uuid, ()) if dead.was(process)]
    if not left:
        return None
    held = format_size(sum(dead.bytes for dead in left))
    pids = first_of([dead.pid for dead in left], MAX_NAMED)
    return f"The previous launch of this run, dead, still holds {held} here (pid {pids})."
