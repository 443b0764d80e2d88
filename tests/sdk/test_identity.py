"""The identity of the process under every launcher."""

from __future__ import annotations

import os

import pytest

from torchmem.sdk._identity import identify, script_name
from torchmem.sdk._settings import Settings

TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "TORCHELASTIC_RUN_ID": "0b8f3f1e-9f2d-4a55-8a0e-4f7e8c0d1a2b",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "GROUP_RANK": "1",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
NAMED = {**SLURM, "SLURM_JOB_NAME": "gpt-large"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (9, 1, 16)),
        (SLURM, (3, 3, 8)),
        (OPEN_MPI, (2, 2, 4)),
        ({**SLURM, **TORCHRUN}, (9, 1, 16)),
        ({"RANK": "x"}, (0, None, None)),
    ],
    ids=["torchrun", "slurm", "open-mpi", "torchrun-in-slurm", "nonsense"],
)
def test_ranks_come_from_the_launcher(
    environment: dict[str, str], expected: tuple[object, ...]
) -> None:
    """Rank, local rank, and world size are read from the launcher nearest to the process."""
    process = identify(Settings(), environment, {})

    assert expected == (process.rank, process.local_rank, process.world_size)
    assert os.getpid() == process.pid


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, "train"),
        (SLURM, "train"),
        (NAMED, "gpt-large"),
        ({**NAMED, **TORCHRUN}, "gpt-large"),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, "train"),
        ({"PBS_JOBNAME": "STDIN", "PBS_JOBID": "7.head"}, "train"),
        ({"JOB_NAME": "finetune-llama"}, "finetune-llama"),
    ],
    ids=["torchrun", "slurm", "named", "torchrun-in-named", "interactive", "pbs", "kubernetes"],
)
def test_the_run_has_the_same_name_at_every_launch(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the job's name or that of the script, and never the id of one launch."""
    monkeypatch.setattr("sys.argv", ["/home/ada/train.py", "--lr", "0.1"])

    assert expected == identify(Settings(), environment, {}).run


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("train.py", "train"),
        ("/home/ada/gpt/__main__.py", "gpt"),
        ("/usr/bin/train", "train"),
        ("-c", "python"),
        ("", "python"),
        ("__main__.py", "python"),
    ],
)
def test_the_script_names_the_run(path: str, expected: str) -> None:
    """The name of a script is that of its file, or of the package that `python -m` runs."""
    assert expected == script_name(path)


@pytest.mark.parametrize(
    ("session", "run", "script"),
    [
        ("work/finetune.ipynb", "finetune", "finetune.ipynb"),
        ("console-1-0f3a", "python", None),
        ("", "python", None),
    ],
)
def test_a_notebook_names_the_run(
    session: str, run: str, script: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the run has its name, and never that of the kernel's launcher."""
    launcher = "/venv/lib/python3.11/site-packages/ipykernel_launcher.py"
    monkeypatch.setattr("sys.argv", [launcher, "-f", "kernel.json"])
    process = identify(Settings(), {"JPY_SESSION_NAME": session}, {})

    assert (run, script) == (process.run, process.script)


def test_settings_beat_the_launcher() -> None:
    """A rank and a run that are set are used as they are."""
    process = identify(Settings(rank=5, run="mine"), TORCHRUN, {"torch": "2.13.0"})

    assert (5, "mine", "2.13.0") == (process.rank, process.run, process.versions["torch"])


def test_launch_ids_become_labels() -> None:
    """The ids of a launch are labels with Prometheus names."""
    assert {"slurm_job_id": "4711"} == identify(Settings(), SLURM, {}).labels
    assert {
        "torchelastic_run_id": TORCHRUN["TORCHELASTIC_RUN_ID"],
        "torchelastic_restart_count": "2",
        "group_rank": "1",
    } == identify(Settings(), TORCHRUN, {}).labels
