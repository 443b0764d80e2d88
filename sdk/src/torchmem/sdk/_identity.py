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

# `sys.argv[0]` without a script.
NO_SCRIPT = {"", "-c", "-m"}

# `sys.argv[0]` in a notebook, and the variable in which Jupyter Server 2 gives its path.
KERNEL_LAUNCHERS = {"ipykernel_launcher.py", "colab_kernel_launcher.py"}
NOTEBOOK_VARIABLE = "JPY_SESSION_NAME"
NOTEBOOK_SUFFIX = ".ipynb"

# Names that people give to a job, and that stay the same from launch to launch: Slurm, PBS, LSF,
# and Grid Engine, whose variable is also the usual one for the name of a Kubernetes Job.
RUN_VARIABLES = ("SLURM_JOB_NAME", "PBS_JOBNAME", "LSB_JOBNAME", "JOB_NAME")
# The schedulers' defaults for a job without a name: the command, or a word for interactive use.
UNNAMED_JOBS = {
    "",
    "bash",
    "interactive",
    "python",
    "python3",
    "qlogin",
    "sh",
    "stdin",
    "torchrun",
    "wrap",
    "zsh",
}

# Ids that differ from launch to launch belong on torchmem_process_info and not in `run`.
LAUNCH_LABELS = {
    "TORCHELASTIC_RUN_ID": "torchelastic_run_id",
    "TORCHELASTIC_RESTART_COUNT": "torchelastic_restart_count",
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_ARRAY_TASK_ID": "slurm_array_task_id",
    "SLURM_JOB_NAME": "slurm_job_name",
    "SLURM_JOB_USER": "slurm_job_user",
    "PBS_JOBID": "pbs_job_id",
    "LSB_JOBID": "lsf_job_id",
    "JOB_NAME": "job_name",
    "POD_NAME": "pod",
    "POD_NAMESPACE": "namespace",
    "GROUP_RANK": "group_rank",
}


def identify(
    settings: Settings, environment: Mapping[str, str], versions: Mapping[str, str]
) -> Process:
    """Return the identity of the calling process; without a launcher it is rank 0."""
    rank = settings.rank if settings.rank is not None else _number(environment, RANK_VARIABLES)
    script = _script(environment)
    name = settings.run or _job_name(environment) or script_name(script)
    return Process(
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        start_ticks=own_start_ticks(),
        hostname=socket.gethostname(),
        run=name,
        rank=rank or 0,
        local_rank=_number(environment, LOCAL_RANK_VARIABLES),
        world_size=_number(environment, WORLD_SIZE_VARIABLES),
        # Its folder and its arguments are not published.
        script=Path(script).name if script not in NO_SCRIPT else None,
        labels={
            label: environment[variable]
            for variable, label in LAUNCH_LABELS.items()
            if environment.get(variable)
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


def _job_name(environment: Mapping[str, str]) -> str | None:
    names = (environment.get(name, "") for name in RUN_VARIABLES)
    return next((name for name in names if name.lower() not in UNNAMED_JOBS), None)


def script_name(path: str) -> str:
    """Return the name of a run after its script: `train` for train.py or `python -m train`.

    It is "python" without a script, as with `python -c`.
    """
    script = Path(path)
    name = script.parent.name if script.stem == "__main__" else script.stem
    return "python" if path in NO_SCRIPT else name or "python"


def _script(environment: Mapping[str, str]) -> str:
    """Return `sys.argv[0]`; in a notebook its path, or "" if that is unknown."""
    first = sys.argv[0] if sys.argv else ""
    if Path(first).name not in KERNEL_LAUNCHERS:
        return first
    notebook = environment.get(NOTEBOOK_VARIABLE, "")
    return notebook if notebook.endswith(NOTEBOOK_SUFFIX) else ""
