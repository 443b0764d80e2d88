"""Who this process is: rank, run, script, and scheduler ids, from its launcher's environment."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from torchmem.sample.procfs import own_start_ticks, pid_namespace
from torchmem.sample.sample import Process
from torchmem.sdk._settings import Settings

# torchrun and torch.distributed, Slurm, Open MPI, MPICH and Intel MPI (hydra), MVAPICH2.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
WORLD_SIZE_VARIABLES = (
    "WORLD_SIZE",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
)

# torchrun sets its run id to "none" unless --rdzv-id is given.
RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_NAME")
UNNAMED_RUNS = {"", "none", "static"}

SCHEDULER_LABELS = {
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_JOB_NAME": "slurm_job_name",
    "SLURM_JOB_USER": "slurm_job_user",
    "POD_NAME": "pod",
    "POD_NAMESPACE": "namespace",
    "GROUP_RANK": "group_rank",
}


def identify(
    settings: Settings, environment: Mapping[str, str], versions: Mapping[str, str]
) -> Process:
    """Return the identity of the calling process; without a launcher it is rank 0."""
    rank = settings.rank if settings.rank is not None else _number(environment, RANK_VARIABLES)
    script = _script()
    return Process(
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        start_ticks=own_start_ticks(),
        hostname=socket.gethostname(),
        run=settings.run or _run_name(environment) or (Path(script).stem if script else "python"),
        rank=rank or 0,
        local_rank=_number(environment, LOCAL_RANK_VARIABLES),
        world_size=_number(environment, WORLD_SIZE_VARIABLES),
        script=script,
        labels={
            label: environment[name]
            for name, label in SCHEDULER_LABELS.items()
            if environment.get(name)
        },
        versions={"python": platform.python_version(), **versions},
    )


def is_multiprocessing_child() -> bool:
    """Return whether Python's multiprocessing started this process, without importing it.

    In such a process the module is loaded already.
    """
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def _run_name(environment: Mapping[str, str]) -> str | None:
    names = (environment.get(name, "") for name in RUN_VARIABLES)
    return next((name for name in names if name not in UNNAMED_RUNS), None)


def _script() -> str | None:
    """Return the script's file name; its directory and arguments are not published."""
    first = sys.argv[0] if sys.argv else ""
    return Path(first).name if first not in {"", "-c", "-m"} else None
