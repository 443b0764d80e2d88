"""The identity of the process under every launcher."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmem.sample.sample import Process
from torchmem.sdk.identity import identify, placed
from torchmem.sdk.program import script_name
from torchmem.sdk.settings import Settings

# What each launcher was seen to set, without the variables that say nothing about the place.
TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "TORCHELASTIC_RUN_ID": "0b8f3f1e-9f2d-4a55-8a0e-4f7e8c0d1a2b",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "GROUP_RANK": "1",
}
# `sbatch --ntasks 8`: in its script, one process outside any step.
SLURM_JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "wrap",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
# `srun` in that job, the task of rank 7.
SLURM_STEP = {
    **SLURM_JOB,
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
}
NAMED = {**SLURM_STEP, "SLURM_JOB_NAME": "gpt-large"}
# `salloc --ntasks 8` with an interactive step: a shell in which one process is started.
SLURM_SHELL = {**SLURM_JOB, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# `srun --mpi=pmi2` has no local rank of its own.
SLURM_PMI2 = {**SLURM_STEP, "PMI_RANK": "7", "PMI_SIZE": "8"}
# Kubeflow's PyTorchJob with one process per pod; torch.distributed reads these.
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "llama-master-0", "MASTER_PORT": "23456"}
# A process that Lightning starts itself: it computes the rank later.
LIGHTNING = {"LOCAL_RANK": "2", "NODE_RANK": "0", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (9, 1, 16)),
        (SLURM_STEP, (7, 3, 8)),
        (SLURM_PMI2, (7, 3, 8)),
        (SLURM_JOB, (0, 0, None)),
        (SLURM_SHELL, (0, 0, 1)),
        (OPEN_MPI, (2, 2, 4)),
        (HYDRA, (3, 1, 4)),
        ({"PMIX_RANK": "1"}, (1, None, None)),
        ({**SLURM_STEP, **TORCHRUN}, (9, 1, 16)),
        ({**OPEN_MPI, **TORCHRUN}, (9, 1, 16)),
        ({**SLURM_JOB, **OPEN_MPI}, (2, 2, 4)),
        ({**SLURM_JOB, "SLURM_STEP_NUM_TASKS": "1", **HYDRA}, (3, 1, 4)),
        ({**SLURM_STEP, "RANK": "7", "WORLD_SIZE": "8"}, (7, 3, 8)),
        ({**SLURM_JOB, "RANK": "7", "WORLD_SIZE": "8"}, (7, None, 8)),
        (KUBEFLOW, (1, None, 4)),
        ({**KUBEFLOW, "JOB_COMPLETION_INDEX": "1"}, (1, None, 4)),
        ({"JOB_COMPLETION_INDEX": "1"}, (0, None, None)),
        (LIGHTNING, (0, 2, 4)),
        ({**SLURM_JOB, **LIGHTNING}, (0, 2, 4)),
        ({"RANK": "x"}, (0, None, None)),
    ],
    ids=[
        "torchrun",
        "srun",
        "srun-pmi2",
        "sbatch-without-srun",
        "salloc-shell",
        "open-mpi",
        "hydra",
        "prterun",
        "torchrun-under-srun",
        "torchrun-under-mpirun",
        "mpirun-in-slurm",
        "hydra-in-slurm",
        "rank-exported-by-srun-script",
        "another-rank-in-slurm",
        "kubeflow",
        "kubeflow-indexed",
        "indexed-job",
        "lightning",
        "lightning-in-slurm",
        "nonsense",
    ],
)
def test_ranks_come_from_the_launcher(
    environment: dict[str, str], expected: tuple[object, ...]
) -> None:
    """Rank, local rank, and world size are those of the launcher nearest to the process."""
    process = identify(Settings(), environment, {})

    assert (process.rank, process.local_rank, process.world_size) == expected
    assert os.getpid() == process.pid


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, "train"),
        (SLURM_STEP, "train"),
        (NAMED, "gpt-large"),
        ({**NAMED, **TORCHRUN}, "gpt-large"),
        ({**SLURM_STEP, "SLURM_JOB_NAME": "interactive"}, "train"),
        ({**SLURM_STEP, "SLURM_JOB_NAME": "python3.11"}, "train"),
        ({"PBS_JOBNAME": "STDIN", "PBS_JOBID": "7.head"}, "train"),
        ({"JOB_NAME": "finetune-llama"}, "finetune-llama"),
    ],
    ids=[
        "torchrun",
        "slurm",
        "named",
        "torchrun-in-named",
        "interactive",
        "python",
        "pbs",
        "kubernetes",
    ],
)
def test_the_run_has_the_same_name_at_every_launch(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the job's name or that of the script, and never the id of one launch."""
    monkeypatch.setattr("sys.argv", ["/home/ada/train.py", "--lr", "0.1"])

    assert identify(Settings(), environment, {}).run == expected


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
    assert script_name(path) == expected


@pytest.mark.parametrize(
    ("session", "run", "script"),
    [
        ("work/finetune.ipynb", "finetune", "finetune.ipynb"),
        ("console-1-0f3a", "experiments", None),
        ("", "experiments", None),
    ],
)
def test_a_notebook_names_the_run(
    session: str,
    run: str,
    script: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a notebook the run has its name, else that of its folder, never that of the launcher."""
    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path / "experiments")
    launcher = "/venv/lib/python3.11/site-packages/ipykernel_launcher.py"
    monkeypatch.setattr("sys.argv", [launcher, "-f", "kernel.json"])
    process = identify(Settings(), {"JPY_SESSION_NAME": session}, {})

    assert (run, script) == (process.run, process.script)


def test_settings_beat_the_launcher() -> None:
    """A rank and a run that are set are used as they are."""
    process = identify(Settings(rank=5, run="mine"), TORCHRUN, {"torch": "2.13.0"})

    assert (process.rank, process.run, process.versions["torch"]) == (5, "mine", "2.13.0")


def test_launch_ids_become_labels() -> None:
    """The ids of a launch are labels with Prometheus names."""
    advised = {"TORCHMEM_ADVICE": "expandable_segments:True"}
    requeued = {**SLURM_STEP, **advised, "SLURM_RESTART_COUNT": "1"}
    assert identify(Settings(), requeued, {}).labels == {
        "advice": "expandable_segments:True",
        "slurm_job_id": "4711",
        "slurm_job_name": "wrap",
        "slurm_restart_count": "1",
    }
    assert {
        "torchelastic_run_id": TORCHRUN["TORCHELASTIC_RUN_ID"],
        "torchelastic_restart_count": "2",
        "group_rank": "1",
    } == identify(Settings(), TORCHRUN, {}).labels


def test_torch_distributed_is_the_truth() -> None:
    """Rank and world size of the process group replace the launcher's, but not a rank that is set.

    The local rank stays: torch.distributed does not know it.
    """
    environment = KUBEFLOW | LIGHTNING
    process = identify(Settings(), environment, {})

    assert process == placed(process, Settings(), environment, None)
    assert replace(process, rank=6, world_size=16) == placed(
        process, Settings(), environment, (6, 16)
    )
    assert _place(placed(process, Settings(rank=1), environment, (6, 16))) == (1, 16)


def _place(process: Process) -> tuple[int, int | None]:
    return process.rank, process.world_size


class Context:
    """Ray's runtime context of an actor's method, with the methods that Ray has."""

    def __init__(self, function: str | None = "tune.Learner.update") -> None:
        self._function = function

    def get_task_function_name(self) -> str | None:
        if self._function is None:
            raise RuntimeError("not in a task")
        return self._function

    def get_job_id(self) -> str:
        return "02000000"

    def get_actor_id(self) -> str | None:
        return "0194980f" if self._function else None


@pytest.mark.parametrize(
    ("function", "expected"), [("tune.Learner.update", "tune"), (None, "ray"), ("", "ray")]
)
def test_an_actor_of_ray_has_the_name_of_its_script(
    function: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Ray's worker process the run is the actor's module and never Ray's own script."""
    worker = "/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py"
    context = SimpleNamespace(is_initialized=lambda: True)
    context.get_runtime_context = lambda: Context(function)
    monkeypatch.setattr("sys.argv", [worker, "--node-ip-address=127.0.0.1"])
    monkeypatch.setitem(sys.modules, "ray", context)
    process = identify(Settings(), {}, {})

    assert (process.run, process.script) == (expected, None)
    assert process.labels["ray_job_id"] == "02000000"


def test_ray_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray is only imported, its runtime context is not asked for: that would start Ray."""
    monkeypatch.setattr("sys.argv", ["ray/_private/workers/default_worker.py"])
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))

    process = identify(Settings(), {}, {})

    assert (process.run, process.labels) == ("ray", {})
