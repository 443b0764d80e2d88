"""What people should know about who holds a GPU, in words: the notes of a GPU, and of a rank."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import format_seconds
from torchmem.node.gpu_holders import Assignment, DeadProcess, MigDevice
from torchmem.node.misplaced import Misplaced, misplaced
from torchmem.node.published import NodeRanks, Published
from torchmem.node.state import GpuNote
from torchmem.output.terminal import counted, first_of
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind

MAX_NAMED = 4
MAX_RANKS = 16


def gpu_notes(found: NodeRanks, uuid: str) -> tuple[GpuNote, ...]:
    """Return the notes about a GPU."""
    rows = [row for row in misplaced(found) if row.uuid == uuid]
    dead, assigned = found.holders.dead.get(uuid, ()), found.holders.assigned.get(uuid, ())
    return (*_misplaced(rows), *_dead(dead), *_empty(found, assigned))


def rank_notes(found: NodeRanks, item: Published, uuid: str) -> tuple[GpuNote, ...]:
    """Return the notes about a rank on one of its GPUs, those about itself first."""
    elsewhere = [
        row for row in misplaced(found) if row.item is item and (row.uuid != uuid or not uuid)
    ]
    return (*_elsewhere(found, elsewhere), *_previous(found, item, uuid), *gpu_notes(found, uuid))


def _misplaced(rows: Sequence[Misplaced]) -> Iterator[GpuNote]:
    """Yield which ranks hold memory on another rank's GPU, by run."""
    for run in dict.fromkeys(row.item.sample.process.run for row in rows):
        of_run = [row for row in rows if row.item.sample.process.run == run]
        ranks = [row.item.sample.process.rank for row in of_run]
        held, owner = format_size(sum(row.bytes for row in of_run)), of_run[0].owner
        who = f"Rank {ranks[0]} of run {run} holds"
        if len(ranks) > 1:
            who = f"Ranks {first_of(ranks, MAX_RANKS)} of run {run} hold"
        text = f"{who} {held} here, on the GPU of rank {owner.sample.process.rank}"
        rest = ", and nothing on another GPU" if all(row.is_all for row in of_run) else ""
        yield _note("set_device", f"{text}{rest}.")


def _elsewhere(found: NodeRanks, rows: Sequence[Misplaced]) -> Iterator[GpuNote]:
    """Yield what a rank holds on the GPUs of others."""
    for row in rows:
        gpu = found.gpus.get(row.uuid)
        where = f"GPU {gpu}" if gpu is not None else row.uuid
        rank = row.owner.sample.process.rank
        text = f"It also holds {format_size(row.bytes)} on {where}, the GPU of rank {rank}."
        yield _note("set_device", text)


def _dead(dead: Sequence[DeadProcess]) -> Iterator[GpuNote]:
    if dead:
        held = format_size(sum(process.bytes for process in dead))
        which = counted(len(dead), "process", "processes")
        verb = "is" if len(dead) == 1 else "are"
        names = first_of(list(map(_name, dead)), MAX_NAMED)
        yield _note("dead_processes", f"{held} is held by {which} that {verb} gone: {names}.")


def _previous(found: NodeRanks, item: Published, uuid: str) -> Iterator[GpuNote]:
    """Yield what an earlier launch of a rank's run left on its GPU."""
    left = [dead for dead in found.holders.dead.get(uuid, ()) if dead.was(item.sample.process)]
    if left:
        held = format_size(sum(dead.bytes for dead in left))
        pids = first_of([dead.pid for dead in left], MAX_NAMED)
        text = f"The previous launch of this run, dead, still holds {held} here (pid {pids})."
        yield _note("dead_processes", text)


def _empty(found: NodeRanks, assigned: Sequence[Assignment]) -> Iterator[GpuNote]:
    """Yield who was given a GPU, or a MIG device of it, and has not used it for long."""
    least = found.thresholds.limits("", platform.node()).gpu_assigned_empty_seconds
    for each in assigned:
        if each.empty_seconds >= least:
            who = first_of(list(map(_holder, each.holders)), MAX_NAMED)
            what = f"{_mig(each.mig)}: assigned" if each.mig else "Assigned"
            text = f"{what} to {who}, without a process for {format_seconds(each.empty_seconds)}."
            yield _note("assigned_empty", text)


def _mig(device: MigDevice) -> str:
    name = f"MIG device {device.profile}" if device.profile else "MIG device"
    return (
        f"{name} (GPU instance {device.gpu_instance}, compute instance {device.compute_instance})"
    )


def _holder(labels: Mapping[str, str]) -> str:
    """Return who was given a GPU: a Slurm job and its user, or a pod."""
    job, user = labels.get("slurm_job_id"), labels.get("user")
    if job:
        return f"Slurm job {job}" + (f" of {user}" if user else "")
    return f"pod {labels.get('namespace', '')}/{labels.get('pod', '')}"


def _note(kind: RemedyKind, text: str) -> GpuNote:
    return GpuNote(kind, text, f"{REMEDY_WORDS[kind]}.")


def _name(dead: DeadProcess) -> str:
    """Return the pid, and who it was as far as that is known."""
    facts = dead.facts
    rank = f"rank {facts['rank']} of run {facts.get('run')}" if "rank" in facts else None
    uid = f"user ID {facts['uid']}" if "uid" in facts else None
    known = ", ".join(filter(None, (rank or facts.get("name"), facts.get("user") or uid)))
    return f"pid {dead.pid} ({known})" if known else f"pid {dead.pid}"
