"""Checks of who holds the memory of the GPUs, by what the exporter serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torchmem.allocator.sizes import format_size
from torchmem.doctor.check import Check, Values
from torchmem.metrics import catalog
from torchmem.output.terminal import first_of
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.untrusted import sanitize_text

MAX_RANKS = 16


def checks(values: Values) -> Iterator[Check]:
    """Yield a problem for each GPU that dead processes or another GPU's ranks hold."""
    for labels, size in values.get(catalog.NVML_DEAD_PROCESS_MEMORY.name, ()):
        if size:
            found = f"{format_size(int(size))} of GPU {_text(labels, 'gpu')} is held by them"
            step = f"{REMEDY_WORDS['dead_processes']}."
            yield Check("processes that are gone", "problem", found, step)
    yield from _misplaced(values)
    yield from _unknown_jobs(values)


def _misplaced(values: Values) -> Iterator[Check]:
    ranks: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for labels, size in values.get(catalog.MISPLACED.name, ()):
        on_gpu = ranks[_text(labels, "gpu"), _text(labels, "run")]
        on_gpu[int(labels.get("rank", 0))] = size
    for (gpu, run), sizes in sorted(ranks.items()):
        held = format_size(int(sum(sizes.values())))
        found = f"rank {first_of(sorted(sizes), MAX_RANKS)} of {run}: {held} on GPU {gpu}"
        step = f"{REMEDY_WORDS['set_device']}."
        yield Check("ranks on others' GPUs", "problem", found, step)


def _unknown_jobs(values: Values) -> Iterator[Check]:
    """Yield a note if the jobs of processes are known by their SLUID only."""
    sluids = {
        _text(labels, "slurm_sluid")
        for labels, _ in values.get(catalog.NVML_PROCESS_INFO.name, ())
        if labels.get("slurm_sluid") and not labels.get("slurm_job_id")
    }
    if sluids:
        names = first_of(sorted(sluids), MAX_RANKS)
        found = f"{names}: from 26.05 on, Slurm names control groups by SLUID and not by job ID"
        step = "Start the exporter with --scontrol, or set CgroupJobIdPaths=yes in cgroup.conf."
        yield Check("Slurm jobs", "note", found, step)


def _text(labels: Mapping[str, str], name: str) -> str:
    return sanitize_text(labels.get(name, ""))
