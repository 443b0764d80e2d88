"""The names of pods on a Kubernetes node: from container logs, and from the kubelet's socket."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import scrape

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.pod_names import (
    AssignedContainer,
    PodContainer,
    PodNames,
    PodProcess,
    logged_containers,
)
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory

GPU, OTHER_GPU = "GPU-0d5c3c0b", "GPU-7b9b1f0a"
ID = {name: f"{number:064x}" for number, name in enumerate(["trainer", "sidecar", "engine"])}
UID = "0d5c3c0b_6bd4_4a7c_9f2f_57b2a3e0c9d1"
TRAINER = PodContainer("gpt-0", "research", "trainer")
ENGINE = PodContainer("vllm-5c9f-x2", "serving", "engine")


def link(directory: Path, name: str) -> None:
    """Create the link of one container's log; its target is not readable here."""
    directory.mkdir(exist_ok=True)
    (directory / name).symlink_to("/var/log/pods/missing/0.log")


def process(pod: str, *gpus: str, container: str | None = None) -> PodProcess:
    """Return a process in a pod."""
    return PodProcess(pod, container, frozenset(gpus or (GPU,)))


def assigned(names: PodContainer, *devices: str) -> AssignedContainer:
    """Return a container with these devices."""
    return AssignedContainer(names, frozenset(devices or (GPU,)))


def named(
    processes: Mapping[int, PodProcess], *containers: AssignedContainer
) -> Mapping[int, Mapping[str, str]]:
    """Return the names where only the kubelet's socket knows any."""
    return PodNames(Path("/missing"), lambda: containers).labels(processes)


def test_pods_that_share_a_gpu(tmp_path: Path) -> None:
    """Two pods on one GPU have their own names, because the container's ID decides."""
    link(tmp_path, f"gpt-0_research_trainer-{ID['trainer']}.log")
    link(tmp_path, f"vllm-5c9f-x2_serving_engine-{ID['engine']}.log")
    processes = {
        7: process("a", container=ID["trainer"]),
        8: process("b", container=ID["engine"]),
        9: process("c", container=ID["sidecar"]),
    }

    assert PodNames(tmp_path).labels(processes) == {7: TRAINER.labels(), 8: ENGINE.labels()}


def test_names_of_logs_that_are_not_the_kubelets(tmp_path: Path) -> None:
    """Truncated IDs and invented names are ignored."""
    for name in (
        f"gpt-0_research_trainer-{ID['trainer'][:-1]}.log",
        f"GPT_research_trainer-{ID['trainer']}.log",
        f"a_b_c_d-{ID['trainer']}.log",
        f'x"\n_b_c-{ID["trainer"]}.log',
        "boot.log",
    ):
        link(tmp_path, name)

    assert logged_containers(tmp_path) == {}


@given(st.text(alphabet=st.characters(exclude_characters="/\0"), min_size=1, max_size=40))
def test_any_name_of_a_log_is_safe(text: str) -> None:
    """A directory entry is a label only if it is a valid Kubernetes name."""
    found = PodNames(Path("/missing"), lambda: [assigned(TRAINER, text)]).labels({7: process("a")})

    assert found in ({}, {7: TRAINER.labels()})


def test_one_pod_has_the_gpu() -> None:
    """Without logs, a process has the name of the only pod that was assigned its GPUs."""
    processes = {7: process("a", GPU, OTHER_GPU), 8: process("a", GPU)}

    assert named(processes, assigned(TRAINER, GPU, OTHER_GPU)) == {
        7: TRAINER.labels(),
        8: TRAINER.labels(),
    }


@pytest.mark.parametrize("devices", [(GPU + "::0", GPU + "::1"), (GPU,)])
def test_shares_of_one_gpu_are_not_guessed(devices: tuple[str, ...]) -> None:
    """Where two pods were assigned one GPU, its processes have no name."""
    containers = assigned(TRAINER, devices[0]), assigned(ENGINE, devices[-1])

    assert named({7: process("a"), 8: process("b")}, *containers) == {}


def test_process_of_a_pod_without_an_assignment() -> None:
    """A monitoring pod on the GPU does not get the name of the pod that has it, nor vice versa."""
    assert named({7: process("a"), 8: process("monitoring")}, assigned(TRAINER)) == {}


def test_two_containers_of_one_pod() -> None:
    """If two containers of a pod share a GPU, the pod is known and the container is not."""
    sidecar = PodContainer(TRAINER.pod, TRAINER.namespace, "sidecar")
    containers = assigned(TRAINER, GPU + "::0"), assigned(sidecar, GPU + "::1")

    assert named({7: process("a")}, *containers) == {7: {"pod": "gpt-0", "namespace": "research"}}


def test_mig_device_is_assigned_by_its_own_uuid() -> None:
    """A MIG device counts, not the GPU that it is part of."""
    assert named(
        {7: process("a", "MIG-1"), 8: process("b", "MIG-2")}, assigned(TRAINER, "MIG-1")
    ) == {7: TRAINER.labels()}


def test_socket_is_not_asked_in_vain(tmp_path: Path) -> None:
    """The kubelet is asked only for processes that the logs do not name."""
    link(tmp_path, f"gpt-0_research_trainer-{ID['trainer']}.log")

    def ask() -> list[AssignedContainer]:
        pytest.fail("the kubelet was asked")

    names = PodNames(tmp_path, ask)

    assert names.labels({7: process("a", container=ID["trainer"])}) == {7: TRAINER.labels()}
    assert names.labels({}) == {}


@contextmanager
def kubelet(socket: Path, answer: bytes | Exception) -> Iterator[None]:
    """Serve the pod-resources API on a socket with one answer to List."""
    grpc = pytest.importorskip("grpc", reason="the extra `kubernetes` is not installed")

    def respond(request: bytes, context: object) -> bytes:
        assert request == b""
        if isinstance(answer, Exception):
            raise answer
        return answer

    service = grpc.method_handlers_generic_handler(
        "v1.PodResourcesLister", {"List": grpc.unary_unary_rpc_method_handler(respond)}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
    assert server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def message(*fields: tuple[int, bytes | str]) -> bytes:
    """Encode fields of a Protocol Buffers message that are strings or messages."""
    encoded = b""
    for number, value in fields:
        data = value.encode() if isinstance(value, str) else value
        assert len(data) < 1 << 14
        size = [len(data) & 127 | 128, len(data) >> 7] if len(data) > 127 else [len(data)]
        encoded += bytes([number << 3 | 2, *size]) + data
    return encoded


def listed(names: PodContainer, resource: str, *devices: str) -> bytes:
    """Encode a ListPodResourcesResponse, also with a field that is not read (the topology)."""
    ids = [(2, device) for device in devices]
    group = message((1, resource), *ids, (3, message((1, b""))))
    container = message((1, names.container or ""), (2, group))
    return message((1, message((1, names.pod), (2, names.namespace), (3, container))))


def test_the_kubelets_answer(tmp_path: Path) -> None:
    """Containers with GPUs are read from a real gRPC server; other devices do not count."""
    pod_resources = pytest.importorskip("torchmem.exporter.pod_resources")
    answer = listed(TRAINER, "nvidia.com/gpu", GPU, OTHER_GPU) + listed(
        ENGINE, "rdma/hca", "mlx5_0"
    )
    with kubelet(tmp_path / "kubelet.sock", answer):
        found = pod_resources.PodResources(tmp_path / "kubelet.sock", 60)()

    assert found == [assigned(TRAINER, GPU, OTHER_GPU)]


def test_gpus_that_are_claimed_by_dra(tmp_path: Path) -> None:
    """The names of NVIDIA's devices in a container's claims are read; those of others are not."""
    pod_resources = pytest.importorskip("torchmem.exporter.pod_resources")
    claims = [
        (4, message((2, driver), (3, "node1"), (4, device)))
        for driver, device in (("gpu.nvidia.com", "gpu-3"), ("nic.example.com", "gpu-4"))
    ]
    container = message((1, "trainer"), (5, message((2, "claim"), (3, "research"), *claims)))
    answer = message((1, message((1, "gpt-0"), (2, "research"), (3, container))))
    with kubelet(tmp_path / "kubelet.sock", answer):
        (found,) = pod_resources.PodResources(tmp_path / "kubelet.sock", 60)()

    assert (found.devices, found.claimed) == (frozenset(), {"gpu-3"})
    assert found.uuids({3: "GPU-a", 4: "GPU-b"}, {}) == {"GPU-a"}


@pytest.mark.parametrize("answer", [b"\xff\xff", RuntimeError("broken")])
def test_a_kubelet_that_fails(
    tmp_path: Path, answer: bytes | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong answer costs only the names, and is logged once."""
    pod_resources = pytest.importorskip("torchmem.exporter.pod_resources")
    resources = pod_resources.PodResources(tmp_path / "kubelet.sock", 60)
    with kubelet(tmp_path / "kubelet.sock", answer):
        assert [resources(), resources()] == [[], []]

    assert sum("kubelet" in record.message for record in caplog.records) == 1


def test_a_kubelet_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing socket costs only the names."""
    pod_resources = pytest.importorskip("torchmem.exporter.pod_resources")

    assert pod_resources.PodResources(tmp_path / "missing.sock")() == []
    assert "missing.sock gives no names of pods" in caplog.text


@pytest.fixture(params=["unified", "systemd"])
def control_group(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Path]]:
    """A function that makes a control group at a path: of version 2, and of version 1."""
    root = Path("/sys/fs/cgroup") / request.param
    if request.param == "unified" and not root.is_dir():
        root = root.parent
    made: list[Path] = []

    def make(path: str) -> Path:
        folder: Path = root
        for name in path.split("/"):
            folder /= name
            try:
                folder.mkdir()
                made.append(folder)
            except FileExistsError:
                pass
            except OSError as error:
                pytest.skip(f"control groups cannot be made here: {error}")
        return folder

    yield make
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            f"kubepods.slice/kubepods-pod{UID}.slice/cri-containerd-{ID['trainer']}.scope",
            {
                "container_id": ID["trainer"],
                "pod_uid": UID.replace("_", "-"),
                "pod": "gpt-0",
                "namespace": "research",
                "container": "trainer",
            },
        ),
        (
            f"kubepods/burstable/pod{UID.replace('_', '-')}/{ID['sidecar']}",
            {"container_id": ID["sidecar"], "pod_uid": UID.replace("_", "-")},
        ),
        (
            f"kubepods.slice/kubepods-pod{UID}.slice/crio-{ID['engine']}.scope/container",
            {"container_id": ID["engine"], "pod_uid": UID.replace("_", "-")},
        ),
        (f"system.slice/docker-{ID['engine']}.scope", {"container_id": ID["engine"]}),
        ("slurm/uid_0/job_77/step_0", {"slurm_job_id": "77"}),
        ("system.slice/slurmstepd.scope/job_77/step_0/user/task_0", {"slurm_job_id": "77"}),
        ("torchmem.slice/train-nightly.service", {"systemd_unit": "train-nightly.service"}),
    ],
)
def test_a_real_process_in_a_real_control_group(
    open_exporter: Callable[..., Exporter],
    control_group: Callable[[str], Path],
    tmp_path: Path,
    path: str,
    expected: Mapping[str, str],
) -> None:
    """The owner of a process on a GPU is read from the group that the kernel has it in."""
    link(tmp_path / "logs", f"gpt-0_research_trainer-{ID['trainer']}.log")
    folder = control_group(path)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            (folder / "cgroup.procs").write_text(str(child.pid))
            memory = MemoryInfo(1000, 600, 400, 0)
            processes = Processes([ProcessMemory(child.pid, 5)], {}, memory)
            gpu = FakeGpu(GpuIdentity(0, GPU), memory, processes)
            pods = PodNames(tmp_path / "logs")
            exposition = scrape(open_exporter(FakeNvml.of(gpu), pods=pods))
        finally:
            child.kill()
    (labels,) = exposition.matching("nvml_process_info", pid=str(child.pid))
    own = {"gpu", "uuid", "pid", "name", "uid", "user"}

    assert {name: value for name, value in labels if name not in own} == expected
    assert dict(labels)["uid"] == str(os.getuid())
