"""A Slurm cluster of one node: munged, slurmctld and slurmd of this user, on free ports."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.stack import free_port, running
from support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


def missing_programs() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [program for program in PROGRAMS if not shutil.which(program, path=_PATH)]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons; yield the variables with which srun and sbatch find them.

    Processes are tracked by their parents, because a test may have no control groups.
    """
    folder.mkdir(mode=0o700)
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder))
    variables = {"SLURM_CONF": str(configuration), "PATH": _PATH}
    environment = os.environ | variables
    with ExitStack() as stack:
        for name, command in _daemons(folder).items():
            log = folder / f"{name}.out"
            stack.enter_context(running(command, log, environment))
            if name == "munged":
                until((folder / "munge.socket").exists)
        until(lambda: b"idle" in _output(["sinfo", "--noheader"], environment), pause=0.2)
        yield variables


def _daemons(folder: Path) -> dict[str, list[str]]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": key}
    files |= {f"{name}-file": folder / f"munge.{name}" for name in ("pid", "log", "seed")}
    files |= {"socket": folder / "munge.socket"}
    munged = [f"--{name}={path}" for name, path in files.items()]
    return {
        "munged": [_program("munged"), "--foreground", "--force", *munged],
        "slurmctld": [_program("slurmctld"), "-D"],
        "slurmd": [_program("slurmd"), "-D"],
    }


def _program(name: str) -> str:
    return shutil.which(name, path=_PATH) or name


def _output(command: list[str], environment: dict[str, str]) -> bytes:
    return subprocess.run(command, env=environment, capture_output=True, check=False).stdout


def _configuration(folder: Path) -> str:
    host, user = socket.gethostname().partition(".")[0], os.geteuid()
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 CoresPerSocket=8 State=UNKNOWN
PartitionName=gpu Nodes={host} Default=YES State=UP
"""
