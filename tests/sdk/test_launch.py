"""Which launch a process belongs to, under every launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from torchmem.sample.launch import is_launch
from torchmem.sdk.identity import identify, placed
from torchmem.sdk.settings import Settings

WORLD = {"WORLD_SIZE": "4"}
ELASTIC = {**WORLD, "TORCHELASTIC_RUN_ID": "0b8f3f1e", "TORCHELASTIC_RESTART_COUNT": "0"}
STATIC = {**WORLD, "TORCHELASTIC_RUN_ID": "none"}
NODE_0 = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LOCAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "86704129",
    "OMPI_MCA_orte_hnp_uri": "86704128.0;tcp://192.0.2.2:55699",
}
HYDRA = {"PMI_SIZE": "4", "PBS_JOBID": "7.head"}

# What the ranks of one launch have, and the variable with the rank.
LAUNCHES = {
    "torchrun": (ELASTIC | NODE_0, "RANK"),
    "torchrun-static": (STATIC | NODE_0, "RANK"),
    "torchrun-one-node": (STATIC | LOCAL, "RANK"),
    "by-hand": (WORLD | NODE_0, "RANK"),
    "srun": (SLURM, "SLURM_PROCID"),
    "torchrun-under-srun": (SLURM | ELASTIC | NODE_0, "RANK"),
    "open-mpi": (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
    "open-mpi-in-slurm": ({**SLURM, "SLURM_PROCID": "0"} | OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
    "prterun": ({"PMIX_NAMESPACE": "prterun-node0-77@1"}, "PMIX_RANK"),
    "hydra": (HYDRA, "PMI_RANK"),
    "hydra-with-address": (HYDRA | NODE_0, "PMI_RANK"),
}


def _launch(environment: Mapping[str, str]) -> str | None:
    return identify(Settings(), environment, {}).launch


def _ranks(launch: tuple[Mapping[str, str], str]) -> set[str | None]:
    environment, rank = launch
    return {_launch({**environment, rank: str(number)}) for number in range(4)}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_all_ranks_of_a_launch_have_one_label(launch: tuple[Mapping[str, str], str]) -> None:
    """The label is the same for every rank, and has the form that readers accept."""
    (label,) = _ranks(launch)

    assert label is not None
    assert is_launch(label)


def test_launches_that_live_at_once_differ() -> None:
    """No two of these launches have the same label, nor do they share one with a lone process."""
    others = {
        "another-port": ({**STATIC, **LOCAL, "MASTER_PORT": "29501"}, "RANK"),
        "another-host": ({**STATIC, **NODE_0, "MASTER_ADDR": "node1"}, "RANK"),
        "tutorial-id": ({**ELASTIC, **NODE_0, "MASTER_ADDR": "node1"}, "RANK"),
        "another-step": ({**SLURM, "SLURM_STEP_ID": "1"}, "SLURM_PROCID"),
        "another-cluster": ({**SLURM, "SLURM_CLUSTER_NAME": "two"}, "SLURM_PROCID"),
        "requeued": ({**SLURM, "SLURM_RESTART_COUNT": "1"}, "SLURM_PROCID"),
        "another-mpirun": ({**OPEN_MPI, "PMIX_NAMESPACE": "86704130"}, "OMPI_COMM_WORLD_RANK"),
        "another-job": ({**HYDRA, "PBS_JOBID": "8.head"}, "PMI_RANK"),
        "another-namespace": ({**WORLD, **NODE_0, "POD_NAMESPACE": "b"}, "RANK"),
    }
    # In these, torchrun meets at the address alone, or Slurm has no part.
    same = {"torchrun-static", "torchrun-under-srun", "open-mpi-in-slurm", "hydra-with-address"}
    launches = {name: launch for name, launch in LAUNCHES.items() if name not in same} | others
    labels = [label for launch in launches.values() for label in _ranks(launch)]

    assert len({*labels, _launch({})}) == len(launches) + 1


def test_a_loopback_address_belongs_to_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with ranks that meet at 127.0.0.1:29500 have two launches, with node0:29500 one."""

    def labels(address: Mapping[str, str]) -> set[str | None]:
        found = set()
        for host in ("node0", "node1"):
            monkeypatch.setattr("socket.gethostname", lambda host=host: host)
            found.add(_launch({**STATIC, **address, "RANK": "1"}))
        return found

    assert len(labels(LOCAL)) == 2
    assert len(labels({**LOCAL, "MASTER_ADDR": "localhost"})) == 2
    assert len(labels(NODE_0)) == 1


def test_an_elastic_restart_is_the_same_launch() -> None:
    """The label does not depend on the restart count, which differs between nodes."""
    first = {**ELASTIC, **NODE_0, "RANK": "0"}

    assert _launch(first) == _launch({**first, "TORCHELASTIC_RESTART_COUNT": "1"})


# Prints the launch of each process that it starts, and its own.
_SCRIPTS = """
import json, multiprocessing, os, sys
from torchmem.sdk.identity import identify
from torchmem.sdk.settings import Settings

def launch(_=None):
    return identify(Settings(), os.environ, {}).launch

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(json.dumps([launch(), *pool.map(launch, range(2))]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_children_of_a_script_belong_to_its_launch(
    method: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What multiprocessing starts is in its parent's launch; the same script twice is two launches.

    A lone process in the same Slurm job, or with an address that others use, is one, too.
    """
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(_SCRIPTS, encoding="utf-8")
    batch = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "1", **LOCAL}
    running = [
        subprocess.Popen(
            [sys.executable, script, method], stdout=subprocess.PIPE, env={**os.environ, **batch}
        )
        for _ in range(2)
    ]
    labels = [json.loads(process.communicate()[0]) for process in running]

    assert [len({*each}) for each in labels] == [1, 1]
    assert labels[0] != labels[1]


def test_ranks_that_meet_are_one_launch() -> None:
    """Processes that no launcher identifies are one launch once they have met at an address."""

    def met(environment: Mapping[str, str]) -> str | None:
        process = identify(Settings(), {}, {})
        assert process.launch == _launch({})
        return placed(process, Settings(), environment, (1, 4)).launch

    by_hand = _launch({**WORLD, **NODE_0, "RANK": "1"})

    assert met(NODE_0) == by_hand != _launch({})
    assert met({}) == _launch({})


def test_a_launchers_id_stays() -> None:
    """An address that the script sets later changes nothing where the launcher has an id."""
    environment = {**SLURM, "SLURM_PROCID": "3"}
    process = identify(Settings(), environment, {})
    late = placed(process, Settings(), {**environment, **NODE_0}, (2, 4))

    assert (late.rank, late.launch) == (2, process.launch)


def test_a_launch_is_one_of_its_user() -> None:
    """The label begins with the user's id."""
    assert str(_launch({})).startswith(f"{os.geteuid()}-")
