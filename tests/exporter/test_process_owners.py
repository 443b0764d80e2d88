"""The labels that identify the owner of a process on a GPU, without secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from torchmem.exporter.process_owners import ProcessOwners, cgroup_labels, is_container

ID = "3f" * 32
OUTER = "a0" * 32
UID = "0d5c3c0b-6bd4-4a7c-9f2f-57b2a3e0c9d1"
UNDERSCORED = UID.replace("-", "_")
STATIC = "7b9b1f0a" * 4
CONTAINER, POD = {"container_id": ID}, {"container_id": ID, "pod_uid": UID}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with one process, which has pid 7 and user ID 1000."""
    entry = tmp_path / "7"
    entry.mkdir()
    (entry / "comm").write_text("python\n")
    (entry / "status").write_text("Name:\tpython\nUid:\t0\t1000\t0\t0\n")
    (entry / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n")
    (entry / "cmdline").write_text("train\0--token=hunter2\0")
    (entry / "environ").write_text("WANDB_API_KEY=hunter2\0")
    return tmp_path


def test_all_labels(proc: Path) -> None:
    """Name, user and job are labels; command line and environment are not read."""
    owners = ProcessOwners(proc, lambda uid: {1000: "ada"}[uid])
    until(lambda: "user" in owners.labels(7))  # it is looked up for half a second at most

    assert owners.labels(7) == {
        "name": "python",
        "uid": "1000",
        "user": "ada",
        "slurm_job_id": "42",
    }


def test_real_process() -> None:
    """The labels come from the kernel's real /proc."""
    labels = ProcessOwners().labels(os.getpid())

    assert (str(os.geteuid()), Path("/proc/self/comm").read_text().strip()) == (
        labels["uid"],
        labels["name"],
    )


@pytest.mark.parametrize("missing", ["comm", "status"])
def test_process_that_ends_has_no_labels(proc: Path, missing: str) -> None:
    """A process that ends while it is read has no labels instead of some of them."""
    (proc / "7" / missing).unlink()

    assert ProcessOwners(proc).labels(7) == {}
    assert ProcessOwners(proc).labels(8) == {}


def test_unreadable_control_groups_leave_the_other_labels(proc: Path) -> None:
    """Name and user ID remain when the cgroup file cannot be read."""
    (proc / "7" / "cgroup").unlink()

    assert ProcessOwners(proc, lambda uid: None).labels(7) == {"name": "python", "uid": "1000"}


def test_name_with_control_characters(proc: Path) -> None:
    """A process can choose any name; its label has no control characters."""
    (proc / "7" / "comm").write_bytes(b'a"\\\xff\x01b\n')

    assert ProcessOwners(proc).labels(7)["name"] == 'a"\\��b'


def test_user_database_that_hangs(proc: Path) -> None:
    """A scrape does not wait for a directory server, which gets one request at a time."""
    answer, asked = Event(), []

    def hang(uid: int) -> str:
        asked.append(uid)
        assert answer.wait(60)
        return "ada"

    owners = ProcessOwners(proc, hang)
    first, second = owners.labels(7), owners.labels(7)
    answer.set()

    assert "user" not in {*first, *second}
    assert until(lambda: owners.labels(7).get("user")) == "ada"
    assert asked == [1000]


def test_container_is_detected_by_its_marker_files(tmp_path: Path) -> None:
    """In a container no user names are looked up, because the image's user database differs."""
    mark = tmp_path / ".dockerenv"
    assert not is_container([mark])
    mark.touch()

    assert is_container([mark])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/docker/{ID}", CONTAINER),
        (f"/system.slice/docker-{ID}.scope", CONTAINER),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", CONTAINER),
        (f"/system.slice/nerdctl-{ID}.scope", CONTAINER),
        (f"/machine.slice/libpod-{ID}.scope/container", CONTAINER),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
            CONTAINER,
        ),
        (f"/libpod_parent/libpod-{ID}", CONTAINER),
        (f"/ecs/5e1c7a/{ID}", CONTAINER),
        (f"/kubepods/burstable/pod{UID}/{ID}", POD),
        (f"/kubepods/pod{UID}/{ID}", POD),
        (
            (
                "/kubepods.slice/kubepods-burstable.slice/"
                f"kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope"
            ),
            POD,
        ),
        (f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope", POD),
        (f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope/container", POD),
        (
            f"/system.slice/containerd.service/kubepods-besteffort-pod{UNDERSCORED}.slice:cri-containerd:{ID}",
            POD,
        ),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/docker-{ID}.scope",
            {"container_id": ID, "pod_uid": STATIC},
        ),
        (f"/../../kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope", POD),
        (f"/docker/{OUTER}/kubelet.slice/kubelet-kubepods.slice/kubepods/pod{UID}/{ID}", POD),
        ("/slurm/uid_1000/job_1234/step_0/task_0", {"slurm_job_id": "1234"}),
        ("/slurm_node7/uid_1000/job_1234/step_batch", {"slurm_job_id": "1234"}),
        ("/system.slice/slurmstepd.scope/job_1234/step_0/user/task_0", {"slurm_job_id": "1234"}),
        ("/system.slice/node7_slurmstepd.scope/job_1234", {"slurm_job_id": "1234"}),
        (
            f"/system.slice/slurmstepd.scope/job_9/step_0/user/docker-{ID}.scope",
            {"slurm_job_id": "9", "container_id": ID},
        ),
        ("/../../system.slice/slurmstepd.scope/job_9/step_0", {"slurm_job_id": "9"}),
        # A user's own control groups, also with Slurm's exact names.
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/slurm-x/job_999", {}),
        (
            "/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_999",
            {},
        ),
        ("/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000/job_999", {}),
        ("/slurm-x/job_999", {}),
        (
            "/system.slice/slurmstepd.scope/job_9/step_0/user/slurm/uid_1000/job_999",
            {"slurm_job_id": "9"},
        ),
        ("/", {}),
        ("/user.slice/user-1000.slice/session-2.scope", {}),
        ("/system.slice/job_7.service", {"systemd_unit": "job_7.service"}),
        ("/home/myslurm.service", {"systemd_unit": "myslurm.service"}),
        ("/system.slice/train.service/workers/3", {"systemd_unit": "train.service"}),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service",
            {"systemd_unit": "jupyter.service"},
        ),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/shell.scope", {}),
        ('/system.slice/a"b.service', {}),
        (f"/short/{ID[:-1]}", {}),
        (f"/long/{ID}0", {}),
    ],
)
def test_labels_by_control_group(path: str, expected: dict[str, str]) -> None:
    """Container, pod, job and unit come from the path, in cgroup version 2 and version 1."""
    assert cgroup_labels(f"0::{path}\n") == expected
    assert (
        cgroup_labels(f"12:devices:{path}\n3:cpu,cpuacct:/\n1:name=systemd:{path}\n0::/\n")
        == expected
    )


@pytest.mark.parametrize("version", ["0:", "4:devices", "1:name=systemd"])
def test_slurm_in_a_container(tmp_path: Path, version: str) -> None:
    """Below other control groups, a job counts only if root owns them all, and they are visible."""
    above = f"/kubepods/pod{UID}/{ID}"
    path = f"{above}/system.slice/slurmstepd.scope/job_9"
    mounted = tmp_path / {"0:": "", "4:devices": "devices", "1:name=systemd": "systemd"}[version]
    text, owner = f"{version}:{path}/step_0/user/task_0\n", tmp_path.stat().st_uid

    unseen = cgroup_labels(text, tmp_path, owner)
    cgroup_labels.cache_clear()
    (mounted / path.lstrip("/")).mkdir(parents=True)

    assert unseen == POD
    assert cgroup_labels(text, tmp_path, owner) == {**POD, "slurm_job_id": "9"}
    assert cgroup_labels(text, tmp_path, owner + 1) == POD


@given(st.text())
def test_any_text_gives_only_ids(text: str) -> None:
    """Users choose names in the file, but the values are only IDs and names of units."""
    for value in cgroup_labels(text).values():
        assert re.fullmatch(r"[\w.:@\\-]+", value, re.ASCII)
