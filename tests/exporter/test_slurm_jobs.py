"""The jobs of Slurm on a node, and the GPUs that Slurm has given them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.waiting import until

from torchmem.exporter.process_owners import cgroup_labels
from torchmem.exporter.slurm_jobs import RETRY_SECONDS, SlurmJob, SlurmJobs, hosts, parsed

SLUID = "s5K1KKYAYG5D00"
# As `scontrol --details --oneliner show job` of Slurm 25.05 prints it, shortened.
SHOWN = (
    "JobId=77 JobName=train UserId=mia(1000) GroupId=mia(1000) Account=vision QOS=normal "
    "JobState=RUNNING NodeList=n[1-2] ReqTRES=cpu=32,node=2,gres/gpu=6 JOB_GRES=gpu:h100:6 "
    "Nodes=n1 CPU_IDs=0-15 Mem=0 GRES=gpu:h100:4(IDX:0-2,5) "
    "Nodes=n2 CPU_IDs=0-15 Mem=0 GRES=shard:1(0/8),gpu:h100:2(IDX:0-1),mps:0 "
    "Command=/home/mia/JobId=1/train.sh WorkDir=/home/mia Comment=UserId=root(0)\n"
)


@pytest.mark.parametrize(
    ("node", "gpus"), [("n1", {0, 1, 2, 5}), ("n2.example.org", {0, 1}), ("n3", set())]
)
def test_a_job_as_scontrol_shows_it(node: str, gpus: set[int]) -> None:
    """User, account and the GPUs of this node count; a later field of a user cannot change them."""
    assert parsed(SHOWN, node) == SlurmJob("77", "mia", "vision", frozenset(gpus))


def test_the_mig_devices_of_a_job() -> None:
    """They are known by profile; the number is that of no GPU's device file."""
    given = "gpu:nvidia_h100_1g.10gb:2(IDX:3,5),gpu:h100:1(IDX:0)"

    assert parsed(f"JobId=8 Nodes=n1 CPU_IDs=0-3 Mem=0 GRES={given}", "n1") == SlurmJob(
        "8", gpus=frozenset({0}), profiles=("1g.10gb", "1g.10gb")
    )


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified\n"])
def test_no_job(text: str) -> None:
    """A job that Slurm no longer knows is none."""
    assert parsed(text, "n1") is None


def test_hosts() -> None:
    """A list of hosts has ranges with leading zeros, and names after and without brackets."""
    assert list(hosts("a,n[1-3,07-08]-ib,b9")) == [
        *("a", "n1-ib", "n2-ib", "n3-ib", "n07-ib", "n08-ib", "b9")
    ]


@pytest.mark.parametrize(
    ("folder", "asked"),
    [
        ("system.slice/slurmstepd.scope/job_77/step_0", "77"),
        (f"system.slice/slurmstepd.scope/{SLUID}/step_0", SLUID),
        (f"system.slice/n1_slurmstepd.scope/{SLUID}", SLUID),
        ("devices/slurm/uid_1000/job_77", "77"),
    ],
)
def test_each_job_is_asked_for_once(tmp_path: Path, folder: str, asked: str) -> None:
    """A job is known by its control group, also under its SLUID, until that is gone."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "system.slice/slurmstepd.scope/system").mkdir(parents=True)
    questions = []

    def ask(job: str) -> str:
        questions.append(job)
        return SHOWN

    jobs = SlurmJobs(Path("scontrol"), tmp_path, "n1", ask)
    assert until(jobs)[asked].id == "77"
    assert jobs()[asked].gpus == {0, 1, 2, 5}
    assert questions == [asked]
    leaf = tmp_path / folder
    while leaf.name in {"step_0", "job_77", SLUID}:
        leaf.rmdir()
        leaf = leaf.parent
    assert jobs() == {}
    jobs.close()


def test_a_controller_that_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs only the new jobs, is asked again a minute later, and is logged once."""
    for job in ("job_7", "job_77"):
        (tmp_path / "system.slice/slurmstepd.scope" / job).mkdir(parents=True)
    failures: dict[str, Exception] = {
        "7": subprocess.CalledProcessError(1, "scontrol"),
        "77": FileNotFoundError("no scontrol"),
    }
    asked, now = [], [0.0]

    def ask(job: str) -> str:
        asked.append(job)
        if job in failures:
            raise failures[job]
        return SHOWN

    jobs = SlurmJobs(Path("scontrol"), tmp_path, "n1", ask, lambda: now[0])
    assert jobs() == {}
    until(lambda: bool(caplog.records))
    assert (jobs(), asked) == ({}, ["7", "77"])
    del failures["77"]
    now[0] = RETRY_SECONDS
    assert until(jobs)["77"].user == "mia"
    assert len(caplog.records) == 1
    assert "the GPUs of new jobs of Slurm are unknown" in caplog.text
    jobs.close()


def test_scontrol_itself(tmp_path: Path) -> None:
    """The program gets the ID as an argument of its own, and its output is read."""
    (tmp_path / f"system.slice/slurmstepd.scope/{SLUID}").mkdir(parents=True)
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\n[ "$5" = {SLUID} ] && cat {tmp_path}/shown\n')
    program.chmod(0o755)
    (tmp_path / "shown").write_text(SHOWN)
    jobs = SlurmJobs(program, tmp_path, "n1")

    assert until(jobs)[SLUID].account == "vision"
    jobs.close()


def test_the_control_group_of_a_process_has_the_sluid() -> None:
    """It is a label of its own: it does not contain the job ID."""
    text = f"0::/../../system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0\n"

    assert cgroup_labels(text) == {"slurm_sluid": SLUID}
