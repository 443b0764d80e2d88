"""`torchmem run --apply-advice` with PyTorch's real allocator, and with what restarts a job."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched_node import Node
from support.phantom import torch_server
from support.slurm_cluster import missing_programs, slurm_cluster
from support.waiting import until

from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX

pytestmark = pytest.mark.allocator

TAKE = """
import os, sys, torch
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
def take(mib): return torch.empty(mib << 20, dtype=torch.uint8, device=device)
"""
# Pieces of a large buffer, which expandable segments join.
LARGE_PIECES = f"""{TAKE}
buffer = take(2800)
del buffer
pieces = [take(size) for _ in range(20) for size in (40, 100)]
del pieces[1::2]
last = take(1600)
print("finished", os.environ.get("PYTORCH_ALLOC_CONF"))
"""
# Pieces that are smaller than the pages of expandable segments.
SMALL_PIECES = f"""{TAKE}
pieces = [take(size) for _ in range(150) for size in (8, 12)]
del pieces[::2]
last = take(1250)
"""
# Each step keeps its outputs, of 16 MiB.
LEAK = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
while True:
    output = model(torch.ones(4096, 1024, device="cuda"))
    output.sum().backward()
    optimizer.step()
    kept.append(output.detach())
"""
EXPANDABLE, SEGMENTS = "expandable_segments:True", "large_segment_size_mb:16"
LAUNCH = [sys.executable, "-m", "torchmem.cli", "run", "--apply-advice", "--name", "night", "--"]
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def has_containers() -> bool:
    """Return whether this user can start a process in a PID namespace of its own."""
    if not shutil.which(CONTAINER[0]):
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


def start(node: Node, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start an attempt in a container of its own if possible; only the run directory is shared.

    A fork of the server of torch is outside of the container.
    """
    container = CONTAINER if has_containers() else []
    return subprocess.run(
        [*container, *node.command(*LAUNCH, *command)],
        env=node.environment(**environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Run a job that dies of small pieces, and keeps a recording."""
    node = Node(tmp_path_factory.mktemp("died"), gpus=1)
    done = start(node, sys.executable, "-c", SMALL_PIECES, TORCHMEM_CAPTURE_ON_OOM="trace")
    assert "OutOfMemoryError" in done.stderr, done.stderr
    assert "torchmem:" not in done.stderr
    return node


def test_a_restarted_container_gets_what_a_replay_proved(died: Node) -> None:
    """With the setting that a replay of the recording has found, the second attempt finishes."""
    done = start(died, sys.executable, "-c", SMALL_PIECES)

    assert done.returncode == 0, done.stderr
    assert f"{SEGMENTS} is added to PYTORCH_ALLOC_CONF by replay" in done.stderr


def test_a_leak_is_restarted_as_it_is(tmp_path: Path) -> None:
    """No setting is added, and the line says that memory leaks, and by how much a step."""
    node = Node(tmp_path, gpus=1)
    first = start(node, *torch_server().python(), "-c", LEAK)
    second = start(node, "printenv", "PYTORCH_ALLOC_CONF")

    assert "OutOfMemoryError" in first.stderr
    assert (second.returncode, second.stdout) == (1, "")
    (line,) = second.stderr.splitlines()
    assert line.startswith("torchmem: no setting is added: memory leak: "), line
    rate = re.search(r"by (\d+\.\d\d) MiB a step", line)
    assert rate, line
    assert 15 < float(rate[1]) < 17  # the mean of all steps that have grown
    assert line.endswith(", which no setting cures.")


def test_a_setting_in_vain_is_withdrawn(died: Node, tmp_path: Path) -> None:
    """Without a recording, the report's rule is tried once, and not at the third attempt."""
    node = Node(tmp_path, gpus=1)
    shutil.copytree(died.folder / "run", node.folder / "run")
    for recording in node.folder.glob(f"run/*/*{OOM_RECORDING_SUFFIX}"):
        recording.unlink()
    second = start(node, *torch_server().python(), "-c", SMALL_PIECES)
    third = start(node, "printenv", "PYTORCH_ALLOC_CONF")

    assert f"{EXPANDABLE} is added to PYTORCH_ALLOC_CONF by the report's rule" in second.stderr
    assert "OutOfMemoryError" in second.stderr
    assert (third.returncode, third.stdout) == (1, "")
    assert f"{EXPANDABLE} is not set again" in third.stderr


def test_ranks_that_torchrun_restarts_finish(tmp_path: Path) -> None:
    """Each rank of an elastic restart gets the setting."""
    node = Node(tmp_path)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    sizes = ["--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        node.command(*agent, *sizes, *LAUNCH, *torch_server().python(), "-c", LARGE_PIECES),
        env=node.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"finished {EXPANDABLE}") == 2
    assert done.stderr.count(f"torchmem: {EXPANDABLE} is added") == 2


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm cluster of one node; its variables."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (apt install slurmctld slurmd munge)")
    with slurm_cluster(tmp_path / "cluster") as variables:
        yield variables


def test_a_job_that_slurm_requeues_finishes(tmp_path: Path, slurm: dict[str, str]) -> None:
    """The same batch job, started again on the same node, gets the setting."""
    node = Node(tmp_path, gpus=1)
    environment = node.environment(**slurm)
    job, script, log = node.folder / "job.py", node.folder / "train.sh", node.folder / "log"
    job.write_text(LARGE_PIECES)
    command = ["srun", *node.command(*LAUNCH, sys.executable, job)]
    script.write_text(f"#!/bin/sh\n{shlex.join(command)}\n")
    batch = ["sbatch", "--parsable", "--requeue", "--open-mode=append", "--output", str(log)]
    number = subprocess.check_output([*batch, str(script)], env=environment, text=True).strip()

    def has_state(state: str) -> bool:
        return f"JobState={state} " in control("show", "job", number)

    def control(*arguments: str) -> str:
        done = subprocess.run(
            ["scontrol", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    until(lambda: has_state("FAILED"), pause=0.5)
    control("requeue", number)
    until(lambda: has_state("COMPLETED"), pause=0.5)
    assert f"finished {EXPANDABLE}" in log.read_text()
    assert log.read_text().count("OutOfMemoryError: CUDA out of memory") == 1
