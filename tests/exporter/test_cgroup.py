"""Control groups name the owner of a process, under every container engine and driver that writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.exporter.process_owners import cgroup_labels

ID = "3f" * 32
OUTER = "a0" * 32
UID = "0d5c3c0b-6bd4-4a7c-9f2f-57b2a3e0c9d1"
UNDERSCORED = UID.replace("-", "_")
STATIC = "7b9b1f0a" * 4
CONTAINER, POD = {"container_id": ID}, {"container_id": ID, "pod_uid": UID}


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
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
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
        ("/", {}),
        ("/user.slice/user-1000.slice/session-2.scope", {}),
        ("/system.slice/job_7.service", {}),
        ("/home/myslurm.service", {}),
        (f"/short/{ID[:-1]}", {}),
        (f"/long/{ID}0", {}),
    ],
)
def test_owner_by_path(path: str, expected: dict[str, str]) -> None:
    """Container, pod and job are found where they are named, in version 2 and in version 1, and nowhere else."""
    assert expected == cgroup_labels(f"0::{path}\n")
    assert expected == cgroup_labels(
        f"12:devices:{path}\n3:cpu,cpuacct:/\n1:name=systemd:{path}\n0::/\n"
    )


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    """The file is the kernel's, but names in it are anybody's: what is found is an id and nothing else."""
    for value in cgroup_labels(text).values():
        assert value.isascii()
        assert value.replace("-", "").isalnum()
