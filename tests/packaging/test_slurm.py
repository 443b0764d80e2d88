"""deploy/slurm: what Slurm runs before and after the tasks of a job."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.reports import STRANDED

from torchmem.explain.oom_report import encode

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "slurm"


def run(script: str, **environment: str) -> str:
    """Run a script of the folder as Slurm does, and return what it prints."""
    done = subprocess.run(
        [FOLDER / script],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


def write(folder: Path, number: int, job: str | None) -> bytes:
    """Write a report of a job, and return its content."""
    labels = {} if job is None else {"slurm_job_id": job}
    report = encode(replace(STRANDED, process=replace(STRANDED.process, labels=labels)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"1-{number}-77-1.oom.json").write_bytes(report)
    return report


@pytest.mark.parametrize(("job", "printed"), [({}, "export TORCHMEM=1\n"), ({"TORCHMEM": "0"}, "")])
def test_every_job_is_monitored(job: dict[str, str], printed: str) -> None:
    """The prolog sets the variable that is enough, unless the job has set it."""
    assert run("task_prolog.sh", **job) == printed


def test_the_reports_of_a_job_are_kept(tmp_path: Path) -> None:
    """The epilog copies the reports of its job, and only those, to the job's folder."""
    own, other = tmp_path / "run" / f"{os.getuid()}", tmp_path / "run" / f"{os.getuid()}-{'0' * 16}"
    reports = [write(own, 1, "77"), write(other, 2, "77")]
    write(own, 3, "7")
    write(own, 4, "777")
    write(own, 5, None)
    write(tmp_path / "run" / "4294967294", 6, "77")
    (own / "1-7-77-1.oom.json").symlink_to(tmp_path / "run" / "4294967294" / "1-6-77-1.oom.json")
    for _ in ("each task", "runs it"):
        run(
            "task_epilog.sh",
            TORCHMEM_RUN_DIR=str(tmp_path / "run"),
            SLURM_SUBMIT_DIR=str(tmp_path),
            SLURM_JOB_ID="77",
        )

    kept = sorted((tmp_path / "torchmem-77").iterdir())
    assert [path.read_bytes() for path in kept] == reports
    assert [path.name for path in kept] == ["1-1-77-1.oom.json", "1-2-77-1.oom.json"]


def test_a_job_without_an_oom_leaves_no_folder(tmp_path: Path) -> None:
    """Without a report, also without a run directory, nothing is written or printed."""
    missing = str(tmp_path / "run")
    run("task_epilog.sh", TORCHMEM_RUN_DIR=missing, HOME=str(tmp_path), SLURM_JOB_ID="77")

    assert list(tmp_path.iterdir()) == []
