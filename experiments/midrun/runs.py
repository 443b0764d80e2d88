"""Workloads for recordings that begin in the middle of a run, and one run of one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from support.phantom import run_on_phantom, torch_server
from support.stack import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("program.py")
Done = subprocess.CompletedProcess[str]
ADDRESSES = ("ascending", "descending", "reuse", "random:1")


@dataclass(frozen=True, slots=True)
class Workload:
    """A command on a GPU, recorded between the ends of the steps `first` and `last`.

    With `ranks`, that many processes run it, each on a GPU of its own.
    """

    command: tuple[str, ...]
    memory: str
    first: int
    last: int
    ranks: int = 0


WORKLOADS = {
    "varying": Workload(("experiments/midrun/varying.py",), "24GB", 30, 40),
    "varying, tight": Workload(("experiments/midrun/varying.py",), "1200MB", 30, 40),
    "gpt": Workload(("examples/gpt.py",), "80GB", 30, 40),
    "gpt, tight": Workload(("examples/gpt.py",), "9GB", 30, 40),
    "resnet50": Workload(("examples/resnet50.py",), "80GB", 5, 10),
    "huggingface": Workload(
        ("examples/huggingface.py", "--width=512", "--layers=4", "--length=512", "--batch=4"),
        "24GB",
        10,
        20,
    ),
    "fsdp2": Workload(
        ("examples/fsdp2.py", "--width=512", "--layers=4", "--sequence=256", "--batch=4"),
        "24GB",
        5,
        12,
        ranks=2,
    ),
    "fsdp2, varying": Workload(("experiments/midrun/varying_fsdp2.py",), "24GB", 20, 30, ranks=2),
    "fsdp2, tight": Workload(("experiments/midrun/varying_fsdp2.py",), "4GB", 20, 30, ranks=2),
}
"""By name; "tight" ones meet the limit of their GPU."""


def run(  # noqa: PLR0913 - each of them varies
    workload: Workload,
    mode: str,
    folder: Path,
    *,
    addresses: str = "reuse",
    conf: str = "",
    torch: Path | None = None,
) -> dict[str, int]:
    """Run a workload on a phantom GPU and return what program.py counts.

    `folder` gets its files. `torch` is a folder with another PyTorch than the installed one.

    Raises:
        RuntimeError: the run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script, *arguments = workload.command
    window = [mode, str(workload.first), str(workload.last), str(folder)]
    steps = f"--steps={workload.last + 1}"
    program = [str(PROGRAM), *window, str(ROOT / script), *arguments, steps]
    own = {"PYTORCH_CUDA_ALLOC_CONF": conf, "TORCHMEM_RUN_DIR": str(folder / "run")}
    own |= {"PHANTOM_ADDRESSES": addresses, "PHANTOM_STATE_DIR": str(folder / "gpus")}
    done = _with(torch, workload, program, own) if torch else _forked(workload, program, own)
    if done.returncode:
        raise RuntimeError(f"{mode} of {script}: {done.stderr[-2000:]}")
    counts: dict[str, int] = json.loads((folder / "counts.json").read_text())
    return counts


def _forked(workload: Workload, program: list[str], own: dict[str, str]) -> Done:
    """Run all ranks in forks of a process that has imported torch."""
    gpus = max(1, workload.ranks)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)} if workload.ranks else {}

    def run_rank(rank: int) -> Done:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if workload.ranks else {}
        environment = {**own, **place, **sizes, **ranks}
        return run_on_phantom(
            *program, memory=workload.memory, devices=gpus, environment=environment
        )

    torch_server("")  # before the threads, each of which would start one
    with ThreadPoolExecutor(gpus) as pool:
        return max(pool.map(run_rank, range(gpus)), key=lambda done: abs(done.returncode))


def _with(torch: Path, workload: Workload, program: list[str], own: dict[str, str]) -> Done:
    """Run all ranks in new processes, with the PyTorch of a folder."""
    python = [sys.executable, "-W", "ignore"]
    if workload.ranks:
        python += ["-m", "torch.distributed.run", f"--nproc-per-node={workload.ranks}"]
    flags = [f"--memory={workload.memory}", f"--gpus={max(1, workload.ranks)}"]
    flags += [f"--state={own['PHANTOM_STATE_DIR']}"]
    path = os.pathsep.join(filter(None, [str(torch), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "torchmem.phantom", *flags, "--", *python, *program],
        env=os.environ | own | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
