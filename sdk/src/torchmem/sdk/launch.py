"""Which launch this process belongs to: what all its ranks know, and no other launch at that time.

`run` is a name for people, and two launches can have the same one. The launcher's id tells them
apart. Where it sets none, the address at which the ranks meet does, because two launches cannot
listen on one port. A process without either is a launch of its own, together with the processes
that its script starts with multiprocessing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.host.procfs import read_file, start_ticks
from torchmem.sample.launch import launch_of

# torchrun's id if none was given (torch/distributed/run.py, `--rdzv-id`).
NO_RUN_ID = "none"
# Variables that all ranks of a launcher have in common, by the one that contains the rank, and
# those without which they identify nothing. Open MPI 4 draws its namespace from 16 bits, so the
# address of its mpirun is added. Without SLURM_STEP_NUM_TASKS, srun did not start the process.
LAUNCH_VARIABLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "OMPI_COMM_WORLD_RANK": (("PMIX_NAMESPACE",), ("OMPI_MCA_orte_hnp_uri",)),
    "PMIX_RANK": (("PMIX_NAMESPACE",), ()),
    "SLURM_PROCID": (
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"),
    ),
}
# Jobs, for launchers without an id: they do not tell two starts of mpiexec in one job apart.
JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")

# Addresses that every host has. Others are the same host for all ranks.
_LOOPBACK = ("localhost", "127.", "0.0.0.0", "::1", "[::1]")  # noqa: S104 - nothing binds to it
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """What the launchers and the host of a process say of it.

    `launchers`: the variables in which launchers passed it its rank, the nearest launcher first.
    """

    environment: Mapping[str, str]
    hostname: str
    launchers: Sequence[str]
    world_size: int | None


def launch(process: LaunchedProcess, ray_job: Sequence[str] = ()) -> str:
    """Return the label of the launch; `ray_job` is the address and the job of a process of Ray."""
    return _label(_launcher(process) or ray_job or _job(process) or _own(process))


def met_launch(process: LaunchedProcess) -> str | None:
    """Return the label of a launch whose ranks have met in torch.distributed.

    None if the launcher identifies it, or if its script has set no address in the environment.
    """
    address = () if _launcher(process) or process.world_size == 1 else _address(process)
    return _label(address) if address else None


def _label(facts: Sequence[str]) -> str:
    return launch_of(os.geteuid(), facts)


def _launcher(process: LaunchedProcess) -> Sequence[str]:
    """Return what the launcher gives to all its ranks; empty without a launcher."""
    run_id, address = process.environment.get("TORCHELASTIC_RUN_ID", ""), _address(process)
    if "RANK" in process.launchers and run_id not in {"", NO_RUN_ID}:
        return ("torchelastic", run_id, *address)  # tutorials use the same id
    if process.world_size == 1:
        return ()  # it does not listen at its address, and its job may start other processes
    for launcher in process.launchers:
        facts = _common(launcher, process.environment) or (address if launcher == "RANK" else ())
        if facts:
            return facts
    return ()


def _common(launcher: str, environment: Mapping[str, str]) -> Sequence[str]:
    required, others = LAUNCH_VARIABLES.get(launcher, ((), ()))
    if not required or not all(environment.get(name) for name in required):
        return ()
    return (launcher, *(environment.get(name, "") for name in (*required, *others)))


def _address(process: LaunchedProcess) -> Sequence[str]:
    """Return where the ranks meet, with this host if every host has that address."""
    name, port = (process.environment.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT"))
    if not name or not port:
        return ()
    host = process.hostname if name.lower().startswith(_LOOPBACK) else ""
    return ("address", _namespace(process.environment), host, name, port)


def _job(process: LaunchedProcess) -> Sequence[str]:
    ids = [process.environment.get(name, "") for name in JOB_VARIABLES]
    has_ranks = bool(process.launchers) and (process.world_size or 1) > 1
    return ("job", *ids) if has_ranks and any(ids) else ()


def _own(process: LaunchedProcess) -> Sequence[str]:
    pid, ticks = _starter()
    return ("process", _namespace(process.environment), process.hostname, str(pid), str(ticks))


def _namespace(environment: Mapping[str, str]) -> str:
    """Return the namespace in Kubernetes: hosts of two namespaces can have the same name."""
    return environment.get("POD_NAMESPACE") or (read_file(_NAMESPACE_FILE) or "").strip()


def _starter() -> tuple[int, int | None]:
    """Return pid and start of the process that started this one by multiprocessing, or its own."""
    module = sys.modules.get("multiprocessing.process")
    parent = module.parent_process() if module else None
    pid = os.getpid() if parent is None or parent.pid is None else parent.pid
    return pid, start_ticks(pid)
