"""One rank of many, alone in its process: its memory is that rank's share of model, gradients and state."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from torchmem.phantom.cards import parse_card
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.result import DeviceMemory, RunResult
from torchmem.preflight.run import run

pytestmark = pytest.mark.allocator

CARD = parse_card("16GB")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, NODE = 2, 8
VOCABULARY, WIDTH, LAYERS, SEQUENCE, BATCH = 32_000, 512, 4, 256, 4
SIZE = tuple(
    f"--{name}={value}"
    for name, value in (("width", WIDTH), ("layers", LAYERS), ("sequence", SEQUENCE))
)
ADAMW = 16
"""Bytes per parameter when the optimizer has stepped: parameter, gradient and two moments, all of 4 bytes."""
BLOCK_MATRICES, BLOCK_NORMS = 12 * WIDTH**2, 4 * WIDTH
EMBEDDINGS, NORM, HEAD = (VOCABULARY + SEQUENCE) * WIDTH, 2 * WIDTH, VOCABULARY * WIDTH
PARAMETERS = LAYERS * (BLOCK_MATRICES + BLOCK_NORMS) + EMBEDDINGS + NORM + HEAD
MIB = 2**20
WORKSPACES = 2 * 32 * MIB
"""PyTorch's own for cuBLAS on compute capability 9.0, of the forward's and of the backward's thread
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""
SLACK = 4 * MIB
"""Rounding to 512 bytes for each tensor, padding of buckets, the batch, scalars."""


@cache
def outcome(example: str, rank: int, world_size: int) -> RunResult:
    """What a preflight of an example on one rank says; run once for all tests."""
    command = (sys.executable, str(EXAMPLES / f"{example}.py"), *SIZE, f"--batch={BATCH}")
    return preflight(command, Placement(rank, world_size, min(world_size, NODE)))


def preflight(command: tuple[str, ...], placement: Placement) -> RunResult:
    """One run on cards of 16 GB; the files of its outcome are gone."""
    plan = RunPlan(command, CARD, placement.local_world_size, STEPS, placement=placement)
    with TemporaryDirectory() as folder:
        return run(plan, Path(folder), lambda _: None)


def memory(example: str, rank: int, world_size: int) -> DeviceMemory:
    """The memory of the rank's own card."""
    (device,) = outcome(example, rank, world_size).devices
    return device


def held(example: str, rank: int, world_size: int) -> int:
    """Bytes that the last step left, its gradients included, workspaces not."""
    return memory(example, rank, world_size).steps[-1].allocated - WORKSPACES


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., Any]:
    """Runs a script as rank 3 of 8, two nodes of 4; gives what it printed as JSON."""

    def script(body: str, rank: int = 3) -> Any:
        completed = lone(tmp_path, body, rank)
        assert 0 == completed.returncode, completed.stderr
        return json.loads(completed.stdout)

    return script


def lone(tmp_path: Path, body: str, rank: int = 3, *flags: str) -> subprocess.CompletedProcess[str]:
    """The script under the command line's own way of starting a rank, and what it said."""
    path = tmp_path / "script.py"
    path.write_text("import json, os, torch, torch.distributed as dist\n" + textwrap.dedent(body))
    placement = Placement(rank, 8, 4)
    plan = RunPlan(
        (sys.executable, "-W", "ignore", str(path), *flags),
        parse_card("4GB"),
        4,
        STEPS,
        placement=placement,
    )
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        (tmp_path / "folder").mkdir()
        result = run(
            plan, tmp_path / "folder", lambda _: None, stdout=out.fileno(), stderr=err.fileno()
        )
    said = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    return subprocess.CompletedProcess(plan.command, result.exit_code, *said)


@pytest.mark.parametrize(
    ("example", "rank", "world_size"),
    [
        ("ddp", 0, 8), ("ddp", 13, 16), ("fsdp2", 0, 8), ("fsdp2", 1023, 1024), ("tensor_parallel", 0, 2),
        ("tensor_parallel", 3, 4), ("pipeline", 0, 4), ("pipeline", 1, 4), ("pipeline", 3, 4),
    ],
)  # fmt: skip
def test_an_example_trains_as_any_rank(example: str, rank: int, world_size: int) -> None:
    """Any rank of any world gets through its steps, on the card of its place in the node."""
    assert ("steps", STEPS) == (
        outcome(example, rank, world_size).ended,
        outcome(example, rank, world_size).steps,
    )
    assert rank % NODE % world_size == memory(example, rank, world_size).device


@pytest.mark.parametrize("world_size", [8, 64])
def test_fsdp2_holds_one_part_of_n(world_size: int) -> None:
    """Parameters, gradients and both moments of AdamW are the model's, divided by the world size."""
    share = ADAMW * PARAMETERS // world_size
    assert share <= held("fsdp2", 0, world_size) < share + SLACK // 4


def test_ddp_holds_everything_and_buckets_of_gradients() -> None:
    """On every rank the whole model and its state, and buckets as large as the gradients."""
    whole = (ADAMW + 4) * PARAMETERS
    assert whole <= held("ddp", 0, 8) < whole + SLACK
    assert held("ddp", 0, 8) == held("ddp", 13, 16)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (3, 4)])
def test_tensor_parallelism_divides_the_matrices(rank: int, world_size: int) -> None:
    """Matrices and the vocabulary are divided; norms and positions are whole on every rank.

    So is the gradient of the token embedding: DTensor gives it as a whole, placed `Replicate()`.
    """
    split = LAYERS * BLOCK_MATRICES + 2 * VOCABULARY * WIDTH
    share = ADAMW * (split // world_size + PARAMETERS - split)
    share += 4 * VOCABULARY * WIDTH * (world_size - 1) // world_size
    assert share <= held("tensor_parallel", rank, world_size) < share + SLACK


@pytest.mark.parametrize(
    ("rank", "ends", "kept"),
    [(0, EMBEDDINGS, 0), (1, 0, 0), (3, NORM + HEAD, 2 * BATCH * SEQUENCE * VOCABULARY)],
)
def test_each_stage_of_a_pipeline_holds_its_own(rank: int, ends: int, kept: int) -> None:
    """A stage holds its block, the first one the embeddings too, the last one the head and the scores it returns."""
    share = ADAMW * (LAYERS // 4 * (BLOCK_MATRICES + BLOCK_NORMS) + ends) + kept
    room = 4 * BATCH * SEQUENCE * WIDTH  # to receive the hidden states of all microbatches
    neighbours = 1 if rank in (0, 3) else 2
    assert (
        share + neighbours * room
        <= held("pipeline", rank, 4)
        < share + neighbours * room + SLACK // 2
    )


def test_an_earlier_stage_holds_more_microbatches() -> None:
    """With 1F1B the second stage of four has three microbatches in flight, the last but one two."""
    first, second = (memory("pipeline", rank, 4) for rank in (1, 2))
    assert first.peak_allocated > second.peak_allocated


def test_nccl_takes_its_estimate_outside_the_allocator() -> None:
    """A communicator of several ranks takes 24 channels of 14 MiB of the card, beside the CUDA context."""
    assert CARD.context_bytes + 24 * 14 * MIB == memory("fsdp2", 0, 8).outside


def test_no_port_is_opened_and_nothing_waits(told: Callable[..., Any]) -> None:
    """With every rendezvous that a script may name, the process has no socket, and is the rank it was told to be."""
    script = """
    seen = []
    for arguments in [{}, {"backend": "nccl"}, {"backend": "cpu:gloo,cuda:nccl", "rank": 7, "world_size": 9},
                      {"backend": "gloo", "init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 2},
                      {"store": dist.TCPStore("127.0.0.1", 1, 8, False)}]:
        dist.init_process_group(**arguments)
        dist.barrier()
        table = [line for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
        inodes = {line.split()[9] for line in table}
        own = {os.path.basename(os.path.realpath(entry.path)) for entry in os.scandir("/proc/self/fd")}
        seen.append([dist.get_rank(), dist.get_world_size(), sum(f"socket:[{inode}]" in own for inode in inodes)])
        dist.destroy_process_group()
    print(json.dumps(seen))
    """
    assert [[3, 8, 0]] * 5 == told(script)


def test_a_group_keeps_the_name_of_its_backend(told: Callable[..., Any]) -> None:
    """Scripts compare the backend's name; sub-groups, meshes and groups on the CPU are there."""
    script = """
    from torch.distributed.device_mesh import init_device_mesh
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    host = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(3), group=host)
    dist.monitored_barrier(host)
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replica", "shard"))
    pair = dist.new_group([1, 3])
    dist.all_reduce(torch.ones(3, device="cuda"), group=pair)
    others = dist.new_group([0, 1, 2])
    print(json.dumps([dist.get_backend(), dist.get_backend(host), mesh.get_coordinate(), dist.get_rank(pair),
                      others == dist.GroupMember.NON_GROUP_MEMBER, dist.is_torchelastic_launched()]))
    dist.destroy_process_group()
    """
    assert ["nccl", "gloo", [0, 3], 1, True, True] == told(script)


def test_object_collectives_behave_as_if_all_ranks_were_alike(told: Callable[..., Any]) -> None:
    """What this rank sends is what everybody sends; what only another rank has, stays unknown."""
    script = """
    dist.init_process_group("nccl", device_id=torch.device("cuda", 3))
    gathered, kept, unknown, own = [None] * 8, ["mine"], [None], [None]
    dist.all_gather_object(gathered, {"rank": 3})
    dist.broadcast_object_list(kept, src=3)
    dist.broadcast_object_list(unknown, src=0)
    dist.scatter_object_list(own, list(range(8)), src=3)
    at_root = [None] * 8
    dist.gather_object("x", at_root, dst=3)
    dist.gather_object("x", None, dst=0)
    print(json.dumps([gathered, kept, unknown, own, at_root]))
    dist.destroy_process_group()
    """
    assert [[{"rank": 3}] * 8, ["mine"], [None], [3], ["x"] * 8] == told(script)


def test_spawn_runs_the_process_of_this_rank(told: Callable[..., Any]) -> None:
    """`torch.multiprocessing.spawn` over the cards of the node calls the function once, with this local rank."""
    script = """
    def train(local_rank, answer):
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=local_rank, world_size=4)
        print(json.dumps([local_rank, answer, dist.get_rank(), dist.get_world_size()]))
        dist.destroy_process_group()

    torch.multiprocessing.spawn(train, args=(42,), nprocs=torch.cuda.device_count())
    """
    assert [3, 42, 3, 8] == told(script)


def test_what_only_another_rank_knows_ends_it_with_a_sentence(tmp_path: Path) -> None:
    """An object from another rank cannot be made up: exit code 2, one sentence, no traceback."""
    completed = lone(
        tmp_path, 'dist.init_process_group("gloo")\ndist.recv_object_list([None], src=0)\n'
    )
    assert 2 == completed.returncode
    assert completed.stderr.splitlines()[-1].startswith(
        "torchmem: the script receives objects from another rank"
    )
    assert "Traceback" not in completed.stderr


def test_the_plain_phantom_has_nccl(tmp_path: Path) -> None:
    """Without a preflight, DataParallel over two cards and DistributedDataParallel alone train."""
    script = f"""
import torch, torch.distributed as dist
wide = torch.nn.DataParallel(torch.nn.Linear(64, 64).cuda())
wide(torch.ones(8, 64).cuda()).sum().backward()
dist.init_process_group("nccl", rank=0, world_size=1, init_method="file://{tmp_path}/rendezvous")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
for _ in range(3):
    model(torch.ones(8, 64).cuda()).sum().backward()
print(torch.cuda.nccl.version() > (2, 0), model.module.weight.grad.shape)
dist.destroy_process_group()
"""
    state = ("--memory", "4GB", "--devices", "2", "--state", str(tmp_path / "state"))
    command = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        *state,
        "--",
        sys.executable,
        "-W",
        "ignore",
        "-c",
        script,
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "True torch.Size([64, 64])\n") == (completed.returncode, completed.stdout), (
        completed.stderr
    )


def test_what_no_kernel_touched_comes_back(tmp_path: Path) -> None:
    """A value sent to a card and fetched again is what it was; after any kernel it is zero."""
    script = """
import torch
values = torch.tensor([3, 4]).cuda()
twin = torch.empty_like(values).copy_(values)
print(values.tolist(), twin[1:].tolist(), values[0].item())
values += 1
print(values.tolist())
"""
    command = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--memory",
        "4GB",
        "--state",
        str(tmp_path / "state"),
        "--",
    ]
    completed = subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "[3, 4] [4] 3\n[0, 0]\n" == completed.stdout, completed.stderr
