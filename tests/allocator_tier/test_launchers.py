"""Real launchers on PyTorch's real allocator: who is which rank, on which node, in which start."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.launched_node import Node
from support.phantom import torch_server
from support.slurm_cluster import missing_programs, slurm_cluster
from support.stack import Prometheus, free_port, prometheus, running
from support.waiting import until

pytestmark = pytest.mark.allocator

TRAIN = """
import os, pathlib, time, torch
local_rank = int(os.environ["LOCAL_RANK"])
weight = torch.nn.Linear(256, 256).to(f"cuda:{local_rank}")
folder = pathlib.Path(os.environ["NODE_FOLDER"])
fail, end = folder / f"fail-{local_rank}", folder / "end"
while not end.exists():
    weight(torch.ones(4, 256, device=weight.weight.device)).sum().backward()
    time.sleep(0.05)
    if fail.exists():
        fail.unlink()
        raise ValueError("asked to fail")
"""


def torchrun(node: Node, script: Path, ranks: int, endpoint: str) -> list[str]:
    """Return the command of one of two agents that meet at `endpoint`."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    size = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    python = torch_server().python()
    return node.monitored(*agent, *where, *size, "--no-python", *python, script)


class Job:
    """A run of two ranks on one node and one on another, and the Prometheus that sees both."""

    def __init__(self, nodes: list[Node], watching: Prometheus) -> None:
        self.nodes = nodes
        self.prometheus = watching

    def settled(self, besides: Sequence[dict[str, str]] = ()) -> list[dict[str, str]]:
        """Return the labels of the live ranks once they are the three of one start."""
        live = self.labels("rank:torchmem_reserved_bytes:sum")
        is_one_start = [labels["rank"] for labels in live] == ["0", "1", "2"]
        is_new = not pids(besides) & pids(live)
        return live if is_one_start and is_new and self.states() == {"running": 3} else []

    def states(self) -> dict[str, int]:
        """Return the number of ranks of the run by state."""
        found = self.prometheus.query("run:torchmem_ranks:count")
        return {item["metric"]["state"]: int(item["value"][1]) for item in found}

    def labels(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of a query's results, by rank."""
        found = [item["metric"] for item in self.prometheus.query(expression)]
        return sorted(found, key=lambda labels: (labels.get("rank", ""), labels.get("uuid", "")))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Start the agents of two nodes, their exporters and a Prometheus."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed")
    script, endpoint = tmp_path / "train.py", f"127.0.0.1:{free_port()}"
    script.write_text(TRAIN)
    nodes = [Node(tmp_path, 1), Node(tmp_path, 2)]
    with ExitStack() as stack:
        exporters = [stack.enter_context(node.exporting()) for node in nodes]
        watching = stack.enter_context(prometheus(tmp_path, exporters))
        for node, ranks in zip(nodes, (2, 1), strict=True):
            agent = torchrun(node, script, ranks, endpoint)
            log = node.folder / "agent.log"
            stack.enter_context(running(agent, log, node.environment()))
        yield Job(nodes, watching)
        for node in nodes:
            (node.folder / "end").touch()


def test_two_nodes_and_a_second_start(job: Job) -> None:
    """Ranks of two nodes are one launch, also after an elastic restart; only the new ranks count.

    torchrun stops the other ranks by SIGTERM. They are `killed`, and fire no alert.
    """
    first = until(job.settled)
    assert {labels["run"] for labels in first} == {"train"}
    assert sorted(labels["gpu"] for labels in first) == ["0", "0", "1"]
    assert tuple(len({labels[name] for labels in first}) for name in ("instance", "uuid")) == (2, 3)

    (job.nodes[0].folder / "fail-0").touch()
    until(lambda: sum(len(node.samples()) for node in job.nodes) == 6)
    second = until(lambda: job.settled(besides=first))
    ended = job.labels("torchmem_process_state{state!='running'} == 1")
    own = f"sum(rank:torchmem_reserved_bytes:sum{{pid=~'{'|'.join(pids(second))}'}})"
    until(lambda: job.prometheus.value(f"run:torchmem_reserved_bytes:sum - on () {own}") == 0)
    assert sorted(labels["state"] for labels in ended) == ["failed", "killed", "killed"]
    assert pids(first) == pids(ended) == pids(job.labels("rank:torchmem_process_state:replaced"))
    # One may be pending from the moment in which the other node had not stopped its rank yet.
    until(lambda: job.labels('ALERTS{alertname=~"TorchmemRank(Killed|Failed)"}') == [])
    # Not the same number on both nodes: the second agent did not fail.
    restarts = job.labels("torchmem_process_info and on (pid) rank:torchmem_process_state:live")
    assert sorted(labels["torchelastic_restart_count"] for labels in restarts) == ["0", "1", "1"]
    assert pids(second) == pids(restarts)
    assert len({labels["launch"] for labels in (*first, *second)}) == 1


def pids(series: Sequence[dict[str, str]]) -> set[str]:
    """Return the pids of series."""
    return {labels["pid"] for labels in series}


ONE_RANK = """
import os, torch
names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
local_rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
{before}
weight = torch.nn.Linear(256, 256).to(f"cuda:{{local_rank}}")
{after}
weight(torch.ones(4, 256, device=weight.weight.device)).sum().backward()
"""
SDK_LINE = "from torchmem import sdk; sdk.instrument()"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
TWO_RANKS = [(0, 0, 2, "0"), (1, 1, 2, "1")]


def ranks_of(node: Node) -> list[tuple[int, int | None, int | None, str]]:
    """Return rank, local rank, world size and last digit of the GPU's UUID of all processes."""
    return [
        (
            *(sample["process"][name] for name in ("rank", "local_rank", "world_size")),
            sample["devices"][0]["uuid"][-1],
        )
        for sample in node.samples()
    ]


def launch(node: Node, *launcher: str, before: str = "", after: str = "", **extra: str) -> None:
    """Run a launcher with ONE_RANK as its script to its end."""
    done = subprocess.run(
        launched(node, launcher, before, after),
        env=node.environment(**extra),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def launched(node: Node, launcher: Sequence[str], before: str, after: str = "") -> list[str]:
    """Return the command of a launcher with ONE_RANK as its script.

    With SDK_LINE in `before` the script has the SDK's line; else the launcher is under
    `torchmem run`.
    """
    script = node.folder / "train.py"
    script.write_text(ONE_RANK.format(before=before, after=after))
    # torchrun starts Python itself.
    program = [] if sys.executable in launcher else [sys.executable]
    command = [*launcher, *program, str(script)]
    return node.command(*command) if before == SDK_LINE else node.monitored(*command)


def needs(*programs: str) -> None:
    """Skip the test without these programs."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


FILL = """
import torch
held = []
try:
    while True:
        held.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print("out of memory after", len(held))
"""


@pytest.mark.parametrize("launcher", [[sys.executable], [*TORCHRUN, "--nproc-per-node", "1"]])
def test_a_wrapped_program_runs_out_of_memory(tmp_path: Path, launcher: list[str]) -> None:
    """Behind a shell, a program whose Python is not on PATH has PyTorch's real OOM.

    tests/phantom/test_wrappers.py has the other wrappers.
    """
    script = tmp_path / "fill.py"
    script.write_text(FILL)
    (tmp_path / "python").symlink_to("/bin/false")
    shell = f"PATH={tmp_path}:$PATH env sh -c {shlex.quote(shlex.join([*launcher, str(script)]))}"
    phantom = [sys.executable, "-m", "torchmem.phantom", "--gpu-model", "2GB"]
    done = subprocess.run(
        [*phantom, "--state", str(tmp_path / "gpus"), "--", "sh", "-c", shell],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.stdout == "out of memory after 5\n", done.stderr[-4000:]


ALL = pytest.mark.skipif(
    "ALL_LAUNCHERS" not in os.environ, reason="takes minutes of CPU time; set ALL_LAUNCHERS=1"
)
BOTH_WAYS = pytest.mark.parametrize("before", ["", SDK_LINE], ids=["run", "sdk"])


@ALL
@BOTH_WAYS
def test_eight_ranks_of_torchrun(tmp_path: Path, before: str) -> None:
    """Each of eight ranks on one node is on its GPU."""
    node = Node(tmp_path, gpus=8)
    launch(node, *TORCHRUN, "--nproc-per-node", "8", before=before)

    assert [(rank, rank, 8, str(rank)) for rank in range(8)] == ranks_of(node)


def test_ranks_of_open_mpi(tmp_path: Path) -> None:
    """mpirun's ranks are those of its own variables, without mpi4py; also in a Slurm job."""
    needs("mpirun")
    node = Node(tmp_path)
    job_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    launch(node, *MPIRUN, "-np", "2", before=SDK_LINE, **job_script)

    assert ranks_of(node) == TWO_RANKS
    assert len({sample["process"]["launch"] for sample in node.samples()}) == 1


def test_a_process_group_decides(tmp_path: Path) -> None:
    """A process group that the script creates after CUDA gives rank and world size."""
    node = Node(tmp_path)
    after = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
"""
    launch(node, after=after, RANK="1", WORLD_SIZE="2")

    assert ranks_of(node) == [(5, None, 8, "0")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run a Slurm cluster of one node; its variables."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (apt install slurmctld slurmd munge)")
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as variables:
        yield variables


@ALL
@BOTH_WAYS
@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (["srun", "--ntasks", "2"], TWO_RANKS),
        (["srun", "--mpi=pmi2", "--ntasks", "2"], TWO_RANKS),
        (["srun", "--ntasks", "1", *TORCHRUN, "--nproc-per-node", "2"], TWO_RANKS),
        ([*MPIRUN, "-np", "2"], TWO_RANKS),
        ([], [(0, 0, None, "0")]),
    ],
    ids=["srun", "srun-pmi2", "srun-torchrun", "mpirun", "no-srun"],
)
def test_ranks_in_a_slurm_job(
    tmp_path: Path,
    slurm: dict[str, str],
    launcher: list[str],
    before: str,
    expected: list[tuple[int, int | None, int | None, str]],
) -> None:
    """In a batch job the nearest launcher gives the ranks, and the job's name is the run's."""
    node = Node(tmp_path)
    script, log, status = (node.folder / name for name in ("train.sh", "log", "status"))
    command = shlex.join(launched(node, launcher, before))
    script.write_text(f"#!/bin/sh\n{command}\necho $? > {status}.new\nmv {status}.new {status}\n")
    batch = ["sbatch", "--ntasks", "4", "--job-name", "gpt-large", "--output", str(log)]
    subprocess.run([*batch, str(script)], env=node.environment(**slurm), check=True)

    assert until(lambda: status.exists() and status.read_text().strip()) == "0", log.read_text()
    assert ranks_of(node) == expected
    assert {sample["process"]["run"] for sample in node.samples()} == {"gpt-large"}
    assert all("slurm_job_id" in sample["process"]["labels"] for sample in node.samples())


RAY = """
import ray

@ray.remote(num_gpus=1)
class Learner:
    def __init__(self, rank, address):
        import torch, torch.distributed as dist
{inside}
        self.weight = torch.nn.Linear(256, 256).cuda()
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def update(self):
        import torch
        optimizer = torch.optim.SGD(self.weight.parameters(), lr=0.1)
        self.weight(torch.ones(4, 256, device="cuda")).sum().backward()
        optimizer.step()

ray.init(num_cpus=2, num_gpus=2, include_dashboard=False)
learners = [Learner.remote(rank, "file://{folder}/rendezvous") for rank in range(2)]
ray.get([learner.update.remote() for learner in learners for _ in range(3)])
"""


@ALL
@BOTH_WAYS
def test_actors_of_ray(tmp_path: Path, before: str) -> None:
    """Actors that form a process group are its ranks, and the run is named after the script."""
    pytest.importorskip("ray", reason="not installed: ray")
    node = Node(tmp_path)
    script = node.folder / "tune.py"
    script.write_text(RAY.format(inside=" " * 8 + before, folder=node.folder))
    command = (sys.executable, script)
    done = subprocess.run(
        node.command(*command) if before else node.monitored(*command),
        env=node.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    # Ray gives an actor any of its GPUs.
    first, second = ranks_of(node)
    assert [first[:3], second[:3]] == [(0, None, 2), (1, None, 2)]
    assert first[3] != second[3]
    for sample in node.samples():
        assert (sample["process"]["run"], sample["process"]["script"]) == ("tune", None)
        assert {"ray_job_id", "ray_actor_id"} <= sample["process"]["labels"].keys()
