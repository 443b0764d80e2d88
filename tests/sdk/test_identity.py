"""The identity of the process under every launcher."""

from __future__ import annotations

import os

import pytest

from torchmem.sdk._identity import identify
from torchmem.sdk._settings import Settings

TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "TORCHELASTIC_RUN_ID": "night",
    "GROUP_RANK": "1",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (9, 1, 16, "night")),
        (SLURM, (3, 3, 8, "4711")),
        (OPEN_MPI, (2, 2, 4, None)),
        ({**SLURM, **TORCHRUN}, (9, 1, 16, "night")),
        ({"RANK": "x", "TORCHELASTIC_RUN_ID": "none"}, (0, None, None, None)),
    ],
    ids=["torchrun", "slurm", "open-mpi", "torchrun-in-slurm", "nonsense"],
)
def test_ranks_come_from_the_launcher(
    environment: dict[str, str], expected: tuple[object, ...]
) -> None:
    """Rank, local rank, world size, and run are read from the launcher nearest to the process."""
    process = identify(Settings(), environment, {})

    assert expected[:3] == (process.rank, process.local_rank, process.world_size)
    assert expected[3] in {process.run, None}
    assert os.getpid() == process.pid


def test_settings_beat_the_launcher() -> None:
    """A rank and a run that are set are used as they are."""
    process = identify(Settings(rank=5, run="mine"), TORCHRUN, {"torch": "2.13.0"})

    assert (5, "mine", "2.13.0") == (process.rank, process.run, process.versions["torch"])


def test_scheduler_ids_become_labels() -> None:
    """Slurm's job id becomes a label with a Prometheus name."""
    assert {"slurm_job_id": "4711"} == identify(Settings(), SLURM, {}).labels
