"""A lone rank has its share of the model, gradients and optimizer state."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.phantom import run_on_phantom, torch_server

from torchmem.phantom.gpus import parse_gpu_model
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.result import GpuMemory, RunResult
from torchmem.preflight.run import run

pytestmark = pytest.mark.allocator

GPU = parse_gpu_model("16GB")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, NODE = 2, 8
VOCABULARY, WIDTH, LAYERS, SEQUENCE, BATCH = 32_000, 512, 4, 256, 4
SIZE = tuple(
    f"--{name}={value}"
    for name, value in (("width", WIDTH), ("layers", LAYERS), ("sequence", SEQUENCE))
)
ADAMW = 16
"""Bytes per parameter after a step: parameter, gradient and two moments of 4 bytes each."""
BLOCK_MATRICES, BLOCK_NORMS = 12 * WIDTH**2, 4 * WIDTH
EMBEDDINGS, NORM, HEAD = (VOCABULARY + SEQUENCE) * WIDTH, 2 * WIDTH, VOCABULARY * WIDTH
PARAMETERS = LAYERS * (BLOCK_MATRICES + BLOCK_NORMS) + EMBEDDINGS + NORM + HEAD
MIB = 2**20
WORKSPACES = 2 * 32 * MIB
"""PyTorch's cuBLAS workspaces on compute capability 9.0, of the forward and the backward thread
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""
SLACK = 4 * MIB
"""Rounding of each tensor to 512 bytes, padding of buckets, the batch, scalars."""


@cache
def result_of(example: str, rank: int, world_size: int) -> RunResult:
    """Run an example as one rank, once for all tests."""
    script = str(EXAMPLES / f"{example}.py")
    command = (*torch_server().python(), script, *SIZE, f"--batch={BATCH}")
    return preflight(command, Placement(rank, world_size, min(world_size, NODE)))


def preflight(command: tuple[str, ...], placement: Placement) -> RunResult:
    """Run a command on GPUs with 16 GB, without keeping the files of its result."""
    plan = RunPlan(command, GPU, placement.local_world_size, STEPS, placement=placement)
    with TemporaryDirectory() as folder:
        return run(plan, Path(folder), lambda _: None)


def memory(example: str, rank: int, world_size: int) -> GpuMemory:
    """Return the memory of the rank's own GPU."""
    (device,) = result_of(example, rank, world_size).devices
    return device


def held(example: str, rank: int, world_size: int) -> int:
    """Return the bytes allocated after the last step, with gradients and without workspaces."""
    return memory(example, rank, world_size).steps[-1].allocated - WORKSPACES


@pytest.fixture
def output_of(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs a script as rank 3 of 8, on two nodes of 4, and its JSON."""

    def script(body: str, rank: int = 3) -> Any:
        completed = run_alone(tmp_path, body, rank)
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout)

    return script


def run_alone(
    tmp_path: Path, body: str, rank: int = 3, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as one rank, and return its output."""
    path = tmp_path / "script.py"
    path.write_text("import json, os, torch, torch.distributed as dist\n" + textwrap.dedent(body))
    placement = Placement(rank, 8, 4)
    plan = RunPlan(
        (*torch_server().python(), str(path), *flags),
        parse_gpu_model("4GB"),
        4,
        STEPS,
        placement=placement,
    )
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        (tmp_path / "folder").mkdir()
        result = run(
            plan, tmp_path / "folder", lambda _: None, stdout=out.fileno(), stderr=err.fileno()
        )
    output = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    return subprocess.CompletedProcess(plan.command, result.exit_code, *output)


@pytest.mark.parametrize(
    ("example", "rank", "world_size"),
    [
        ("ddp", 0, 8),
        ("ddp", 13, 16),
        ("fsdp2", 0, 8),
        ("fsdp2", 1023, 1024),
        ("tensor_parallel", 0, 2),
        ("tensor_parallel", 3, 4),
        ("pipeline", 0, 4),
        ("pipeline", 1, 4),
        ("pipeline", 3, 4),
    ],
)
def test_an_example_trains_as_any_rank(example: str, rank: int, world_size: int) -> None:
    """Every rank of every world size makes its steps, on the GPU of its local rank."""
    result = result_of(example, rank, world_size)
    assert (result.ended, result.steps) == ("steps", STEPS)
    assert rank % NODE % world_size == memory(example, rank, world_size).device


@pytest.mark.parametrize("world_size", [8, 64])
def test_fsdp2_divides_everything(world_size: int) -> None:
    """Parameters, gradients and both moments of AdamW are divided by the world size."""
    share = ADAMW * PARAMETERS // world_size
    assert share <= held("fsdp2", 0, world_size) < share + SLACK // 4


def test_ddp_has_the_whole_model_and_buckets() -> None:
    """Every rank has the whole model, its state, and buckets as large as the gradients."""
    whole = (ADAMW + 4) * PARAMETERS
    assert whole <= held("ddp", 0, 8) < whole + SLACK
    assert held("ddp", 0, 8) == held("ddp", 13, 16)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (3, 4)])
def test_tensor_parallelism_divides_the_matrices(rank: int, world_size: int) -> None:
    """Matrices and the vocabulary are divided; norms and positions are replicated.

    The gradient of the token embedding is replicated too: DTensor places it as `Replicate()`.
    """
    split = LAYERS * BLOCK_MATRICES + 2 * VOCABULARY * WIDTH
    share = ADAMW * (split // world_size + PARAMETERS - split)
    share += 4 * VOCABULARY * WIDTH * (world_size - 1) // world_size
    assert share <= held("tensor_parallel", rank, world_size) < share + SLACK


@pytest.mark.parametrize(
    ("rank", "ends", "kept"),
    [(0, EMBEDDINGS, 0), (1, 0, 0), (3, NORM + HEAD, 2 * BATCH * SEQUENCE * VOCABULARY)],
)
def test_each_pipeline_stage_has_its_own_layers(rank: int, ends: int, kept: int) -> None:
    """A stage has its block; the first one has the embeddings, the last one head and scores."""
    share = ADAMW * (LAYERS // 4 * (BLOCK_MATRICES + BLOCK_NORMS) + ends) + kept
    room = 4 * BATCH * SEQUENCE * WIDTH  # to receive the hidden states of all microbatches
    neighbors = 1 if rank in (0, 3) else 2
    assert (
        share + neighbors * room
        <= held("pipeline", rank, 4)
        < share + neighbors * room + SLACK // 2
    )


def test_an_earlier_stage_has_more_microbatches() -> None:
    """With 1F1B, the second of four stages has three microbatches in flight, the third has two."""
    first, second = (memory("pipeline", rank, 4) for rank in (1, 2))
    assert first.peak_allocated > second.peak_allocated


def test_nccl_takes_memory_outside_the_allocator() -> None:
    """NCCL takes memory for its kernels, and a communicator for its channels and their buffers."""
    own = (32 * 3 + 2) * 2 * MIB
    assert GPU.context_bytes + 160 * MIB + own + 24 * 14 * MIB == memory("fsdp2", 0, 8).outside


def test_a_communicator_of_one_rank_takes_as_much_as_on_a_real_gpu(
    tmp_path: Path,
) -> None:
    """It has 64 channels: an H200 showed 558 MiB with NCCL's kernels, within 3% of these 548."""
    script = f"""
import torch, torch.distributed as dist
def free():
    return torch.cuda.mem_get_info()[0] >> 20
torch.zeros(1, device="cuda")
before = free()
dist.init_process_group("nccl", rank=0, world_size=1, init_method="file://{tmp_path}/rendezvous",
                        device_id=torch.device("cuda", 0))
within = free()
dist.destroy_process_group()
print(before - within, before - free())
"""
    completed = run_on_phantom("-c", script, memory="4GB", state=tmp_path / "state", environment={})
    assert completed.stdout == "548 160\n", completed.stderr


def test_no_port_is_opened_and_nothing_waits(output_of: Callable[..., Any]) -> None:
    """With any rendezvous method, the process has no socket and is the configured rank."""
    script = """
    seen = []
    for arguments in [
        {},
        {"backend": "nccl"},
        {"backend": "cpu:gloo,cuda:nccl", "rank": 7, "world_size": 9},
        {"backend": "gloo", "init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 2},
        {"store": dist.TCPStore("127.0.0.1", 1, 8, False)},
    ]:
        dist.init_process_group(**arguments)
        dist.barrier()
        tables = [open(f"/proc/self/net/{name}").readlines()[1:] for name in ("tcp", "tcp6")]
        inodes = {line.split()[9] for table in tables for line in table}
        files = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
        own = {os.path.basename(file) for file in files}
        sockets = sum(f"socket:[{inode}]" in own for inode in inodes)
        seen.append([dist.get_rank(), dist.get_world_size(), sockets])
        dist.destroy_process_group()
    print(json.dumps(seen))
    """
    assert output_of(script) == [[3, 8, 0]] * 5


def test_a_group_keeps_the_name_of_its_backend(output_of: Callable[..., Any]) -> None:
    """Backend names are real; sub-groups, meshes and CPU groups work."""
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
    is_outside = others == dist.GroupMember.NON_GROUP_MEMBER
    print(json.dumps([dist.get_backend(), dist.get_backend(host), mesh.get_coordinate(),
                      dist.get_rank(pair), is_outside, dist.is_torchelastic_launched()]))
    dist.destroy_process_group()
    """
    assert output_of(script) == ["nccl", "gloo", [0, 3], 1, True, True]


def test_object_collectives_assume_that_ranks_are_alike(output_of: Callable[..., Any]) -> None:
    """All ranks send what this rank sends; an object of another rank remains None."""
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
    assert output_of(script) == [[{"rank": 3}] * 8, ["mine"], [None], [3], ["x"] * 8]


def test_spawn_runs_this_rank(output_of: Callable[..., Any]) -> None:
    """`torch.multiprocessing.spawn` calls the function once, with this local rank."""
    script = """
    def train(local_rank, answer):
        method = "tcp://127.0.0.1:1"
        dist.init_process_group("nccl", init_method=method, rank=local_rank, world_size=4)
        print(json.dumps([local_rank, answer, dist.get_rank(), dist.get_world_size()]))
        dist.destroy_process_group()

    torch.multiprocessing.spawn(train, args=(42,), nprocs=torch.cuda.device_count())
    """
    assert output_of(script) == [3, 42, 3, 8]


def test_receiving_objects_ends_the_script(tmp_path: Path) -> None:
    """An object from another rank is unknown: exit code 2, one sentence, no traceback."""
    completed = run_alone(
        tmp_path, 'dist.init_process_group("gloo")\ndist.recv_object_list([None], src=0)\n'
    )
    assert completed.returncode == 2
    assert completed.stderr.splitlines()[-1].startswith(
        "torchmem: the script receives objects from another rank"
    )
    assert "Traceback" not in completed.stderr


def test_the_plain_phantom_has_nccl(tmp_path: Path) -> None:
    """DataParallel on two GPUs and DistributedDataParallel on one train without a preflight."""
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
    completed = run_on_phantom(
        "-c", script, memory="4GB", devices=2, state=tmp_path / "state", environment={}
    )
    assert (completed.returncode, completed.stdout) == (0, "True torch.Size([64, 64])\n"), (
        completed.stderr
    )


def test_host_writes_read_back_until_a_kernel_runs(tmp_path: Path) -> None:
    """A value copied to a GPU and back is unchanged; after any kernel it is zero."""
    script = """
import torch
values = torch.tensor([3, 4]).cuda()
twin = torch.empty_like(values).copy_(values)
print(values.tolist(), twin[1:].tolist(), values[0].item())
values += 1
print(values.tolist())
"""
    completed = run_on_phantom("-c", script, memory="4GB", state=tmp_path / "state", environment={})
    assert completed.stdout == "[3, 4] [4] 3\n[0, 0]\n", completed.stderr


def test_the_estimate_of_nccl_is_told_by_process_group(tmp_path: Path) -> None:
    """What NCCL takes is a part of what is outside PyTorch, by the names that a live run has."""
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist
            dist.init_process_group("nccl")
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                model(torch.ones(1, 8, device="cuda")).sum().backward()
                optimizer.step()
        """)
    )
    result = preflight((*torch_server().python(), str(path)), Placement(0, 8, 8))
    (device,) = result.devices

    major, minor = (int(number) for number in result.torch_version.split(".")[:2])
    if (major, minor) < (2, 12):
        pytest.skip("this PyTorch does not hand on what NCCL counts")
    assert device.communicators == (("default_pg", (196 + 336) * MIB),)
    assert device.communicators[0][1] < device.outside
