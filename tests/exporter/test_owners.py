"""What the kernel tells about a process on a GPU: all that helps to find its owner, and no secret."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest
from support.waiting import until

from torchmem.exporter.process_owners import ProcessOwners, is_container


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with one process, pid 7, of user 1000."""
    entry = tmp_path / "7"
    entry.mkdir()
    (entry / "comm").write_text("python\n")
    (entry / "status").write_text("Name:\tpython\nUid:\t0\t1000\t0\t0\n")
    (entry / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n")
    (entry / "cmdline").write_text("train\0--token=hunter2\0")
    (entry / "environ").write_text("WANDB_API_KEY=hunter2\0")
    return tmp_path


def test_all_facts(proc: Path) -> None:
    """Name, user and job; command line and environment are not read."""
    facts = ProcessOwners(proc, lambda uid: {1000: "ada"}[uid]).labels(7)

    assert {"name": "python", "uid": "1000", "user": "ada", "slurm_job_id": "42"} == facts


def test_real_process() -> None:
    """The kernel's own /proc has what is read."""
    facts = ProcessOwners().labels(os.getpid())

    assert (str(os.geteuid()), Path("/proc/self/comm").read_text().strip()) == (
        facts["uid"],
        facts["name"],
    )


@pytest.mark.parametrize("missing", ["comm", "status"])
def test_vanished_process_has_no_facts(proc: Path, missing: str) -> None:
    """A process that ends while it is read leaves nothing half true."""
    (proc / "7" / missing).unlink()

    assert {} == ProcessOwners(proc).labels(7)
    assert {} == ProcessOwners(proc).labels(8)


def test_hidden_control_groups_cost_only_themselves(proc: Path) -> None:
    """Where the cgroup file cannot be read, name and user are still known."""
    (proc / "7" / "cgroup").unlink()

    assert {"name": "python", "uid": "1000"} == ProcessOwners(proc, lambda uid: None).labels(7)


def test_name_of_any_bytes_becomes_a_label(proc: Path) -> None:
    """A process may call itself anything; what is shown has no control characters."""
    (proc / "7" / "comm").write_bytes(b'a"\\\xff\x01b\n')

    assert 'a"\\��b' == ProcessOwners(proc).labels(7)["name"]


def test_user_database_that_hangs_is_not_waited_for(proc: Path) -> None:
    """A directory server that does not answer costs the user's name, not the scrape, and is asked once at a time."""
    answer, asked = Event(), []

    def hang(uid: int) -> str:
        asked.append(uid)
        assert answer.wait(60)
        return "ada"

    owners = ProcessOwners(proc, hang)
    first, second = owners.labels(7), owners.labels(7)
    answer.set()
    until(lambda: not owners._worker.is_busy)

    assert "user" not in {*first, *second}
    assert "ada" == owners.labels(7)["user"]
    assert [1000] == asked


def test_a_container_is_told_by_what_its_runtime_leaves(tmp_path: Path) -> None:
    """In a container the image's user database would give other people's names, so none are given."""
    mark = tmp_path / ".dockerenv"
    assert not is_container([mark])
    mark.touch()

    assert is_container([mark])
