"""Train a transformer with tensor parallelism (DTensor).

The two lines marked `torchmem` are all that monitoring requires.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py
    torchmem preflight --gpu-model h100-80gb --world-size 4 -- \
        python examples/tensor_parallel.py                                  # without a GPU
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import VOCABULARY, Transformer, flags, next_token_loss, own_device, print_memory

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Split attention by heads, the feed-forward network by columns and rows, the vocabulary."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        "query": columns,
        "key": columns,
        "value": columns,
        "out": rows,
        "up": columns,
        "down": rows,
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def main() -> None:
    """Train with every matrix split over all ranks, which compute on the same batch."""
    arguments = flags(__doc__).parse_args()
    device = own_device()
    torch.manual_seed(0)  # the same batch on every rank
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Transformer(arguments.width, arguments.layers, arguments.sequence).to(device)
    parallelize(model, mesh)
    # foreach=False, because a foreach step cannot mix DTensors with the norms, which are not split.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence + 1)).to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print_memory(step, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
