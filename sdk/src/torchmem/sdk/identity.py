"""Who this process is: rank, run, script, and scheduler ids, from its launcher's environment."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchmem.allocator.settings import ADVICE_LABEL, ADVICE_VARIABLE
from torchmem.host.procfs import own_start_ticks, pid_namespace, start_time
from torchmem.sample.sample import Process
from torchmem.sdk.launch import LaunchedProcess, launch, met_launch
from torchmem.sdk.program import RAY_WORKER, program
from torchmem.sdk.safety.interruptions import ignore
from torchmem.sdk.settings import Settings


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher passes its rank to a process; None if it sets none."""

    rank: str
    local_rank: str | None = None
    world_size: str | None = None


# The launcher nearest to the process first: a process inherits all outer ones' variables.
# Under mpirun in a Slurm job, SLURM_PROCID belongs to the one task that runs mpirun, and
# SLURM_NTASKS to the job, even in a process that srun did not start.
LAUNCHERS = (
    Launcher("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun, and what is made for torch's env://
    Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    Launcher("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH and Intel MPI (hydra)
    Launcher("PMIX_RANK"),  # prterun
    Launcher("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)

# Names that people give to a job, and that stay the same from launch to launch: Slurm, PBS, LSF,
# and Grid Engine, whose variable is also the usual one for the name of a Kubernetes Job.
RUN_VARIABLES = ("SLURM_JOB_NAME", "PBS_JOBNAME", "LSB_JOBNAME", "JOB_NAME")
# The schedulers' defaults for a job without a name: the command, or a word for interactive use.
UNNAMED_JOBS = {
    "",
    "accelerate",
    "bash",
    "deepspeed",
    "interactive",
    "mpiexec",
    "mpirun",
    "python",
    "qlogin",
    "ray",
    "sh",
    "stdin",
    "submitit",
    "torchmem",
    "torchrun",
    "uv",
    "wrap",
    "zsh",
}

# Ids that differ from launch to launch belong on torchmem_process_info and not in `run`.
LAUNCH_LABELS = {
    "TORCHELASTIC_RUN_ID": "torchelastic_run_id",
    "TORCHELASTIC_RESTART_COUNT": "torchelastic_restart_count",
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_RESTART_COUNT": "slurm_restart_count",
    "SLURM_ARRAY_TASK_ID": "slurm_array_task_id",
    "SLURM_JOB_NAME": "slurm_job_name",
    "SLURM_JOB_USER": "slurm_job_user",
    "SLURM_JOB_ACCOUNT": "slurm_job_account",
    "PBS_JOBID": "pbs_job_id",
    "LSB_JOBID": "lsf_job_id",
    "JOB_NAME": "job_name",
    "POD_NAME": "pod",
    "POD_NAMESPACE": "namespace",
    "JOB_COMPLETION_INDEX": "job_completion_index",
    "RAY_CLUSTER_NAME": "ray_cluster",
    "GROUP_RANK": "group_rank",
    ADVICE_VARIABLE: ADVICE_LABEL,
}

# In `sys.argv[0]` of the processes of torch.compile (torch/_inductor: compile_worker/__main__.py,
# __autotune_main__.py), and of those that they fork or spawn.
COMPILE_SCRIPTS = "/torch/_inductor/"


def identify(
    settings: Settings, environment: Mapping[str, str], versions: Mapping[str, str]
) -> Process:
    """Return the identity of the calling process; without a launcher it is rank 0."""
    rank = _launched_rank(environment)
    found, ray = program(environment), _ray_context()
    ticks, hostname = own_start_ticks(), socket.gethostname()
    place = LaunchedProcess(environment, hostname, rank.launchers, rank.world_size)
    return Process(
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        start_ticks=ticks,
        start_timestamp=None if ticks is None else start_time(ticks, time.time()),
        hostname=hostname,
        run=settings.run or _job_name(environment) or _ray_name(ray) or found.name,
        launch=launch(place, _ray_job(ray)),
        rank=rank.rank if settings.rank is None else settings.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        # Its folder and its arguments are not published.
        script=found.script,
        labels=_launch_labels(environment) | _ray_labels(ray),
        versions={"python": platform.python_version(), **versions},
    )


def placed(
    process: Process,
    settings: Settings,
    environment: Mapping[str, str],
    world: tuple[int, int] | None,
) -> Process:
    """Return the process with its rank and world size in torch.distributed.

    They replace the launcher's, and exist without a launcher too, as in
    torch.multiprocessing.spawn. The setting `rank` takes precedence. `world` is `Backend.world()`.
    Without a launcher's id, where the ranks have met identifies the launch.
    """
    if world is None:
        return process
    rank, world_size = world
    rank = rank if settings.rank is None else settings.rank
    if (rank, world_size) == (process.rank, process.world_size):
        return process
    launchers = _launched_rank(environment).launchers
    found = met_launch(LaunchedProcess(environment, process.hostname, launchers, world_size))
    return replace(process, rank=rank, world_size=world_size, launch=found or process.launch)


def is_compile_process() -> bool:
    """Return whether torch.compile started this process, to compile kernels or to time them.

    It inherits the rank of the process for which it works, and may allocate GPU memory.
    """
    return COMPILE_SCRIPTS in (sys.argv[0] if sys.argv else "")


def is_multiprocessing_child() -> bool:
    """Return whether Python's multiprocessing started this process, without importing it.

    A process that multiprocessing started has already loaded that module.
    """
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


@dataclass(frozen=True, slots=True)
class _Rank:
    """What launchers say; `launchers` are the variables of those that say so, the nearest first."""

    rank: int
    local_rank: int | None
    world_size: int | None
    launchers: tuple[str, ...]


def _launched_rank(environment: Mapping[str, str]) -> _Rank:
    """Return the innermost launcher's values.

    Missing values come from launchers that set the same rank, or no rank.
    """
    said = {launcher: _number(environment, launcher.rank) for launcher in LAUNCHERS}
    rank = _first(said.values()) or 0
    agreeing = [launcher for launcher, number in said.items() if number in {rank, None}]
    local_rank = _first(_number(environment, launcher.local_rank) for launcher in agreeing)
    size = _first(_number(environment, launcher.world_size) for launcher in agreeing)
    same = (
        launcher.rank
        for launcher, number in said.items()
        if number == rank and _number(environment, launcher.world_size) in {size, None}
    )
    return _Rank(rank, local_rank, size, tuple(same))


def _first(numbers: Iterable[int | None]) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _number(environment: Mapping[str, str], name: str | None) -> int | None:
    text = environment.get(name, "") if name else ""
    return int(text) if text.isascii() and text.isdigit() else None


def _launch_labels(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        label: environment[variable]
        for variable, label in LAUNCH_LABELS.items()
        if environment.get(variable)
    }


def _ray_context() -> Any:
    """Return the runtime context of a process of Ray, or None in any other."""
    is_worker = bool(sys.argv) and sys.argv[0].endswith(RAY_WORKER)
    ray: Any = sys.modules.get("ray") if is_worker else None
    with ignore(Exception):
        # Otherwise `get_runtime_context` may start a cluster.
        if ray is not None and ray.is_initialized():
            return ray.get_runtime_context()
    return None


def _ray_name(context: Any) -> str | None:
    """Return the module of the task or actor: the script's name if the script defines it."""
    with ignore(Exception):
        return str(context.get_task_function_name()).partition(".")[0] if context else None
    return None


def _ray_job(context: Any) -> tuple[str, ...]:
    """Return the cluster and the job, which has no other script."""
    with ignore(Exception):
        if context:
            return "ray", str(context.gcs_address), str(context.get_job_id())
    return ()


def _ray_labels(context: Any) -> dict[str, str]:
    with ignore(Exception):
        if context:
            known = {"ray_job_id": context.get_job_id(), "ray_actor_id": context.get_actor_id()}
            return {label: text for label, text in known.items() if text}
    return {}


def _job_name(environment: Mapping[str, str]) -> str | None:
    names = (environment.get(name, "") for name in RUN_VARIABLES)
    return next((name for name in names if _command(name) not in UNNAMED_JOBS), None)


def _command(name: str) -> str:
    """Return the name in lower case, without the version of Python."""
    command = name.lower()
    return "python" if command.rstrip("0123456789.") == "python" else command
