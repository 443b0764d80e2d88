"""Train a transformer with FSDP2 (`fully_shard`) in bf16.

The two lines marked `torchmem` are all that monitoring requires.

    torchrun --nproc-per-node 8 examples/fsdp2.py

Without a GPU, rank 0 of 1,024 of a model with 7.5 B parameters:

    torchmem preflight --gpu-model h100-80gb --world-size 1024 -- \
        python examples/fsdp2.py --width 4096 --layers 36 --sequence 4096 --batch 1
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformer import VOCABULARY, Transformer, flags, next_token_loss, own_device, print_memory

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem


def shard(model: Transformer) -> None:
    """Shard every block and then the rest; compute in bf16 and reduce gradients in fp32."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mp_policy=precision)


def materialize(model: Transformer, device: torch.device) -> None:
    """Allocate this rank's shards of a model on the meta device, and initialize them."""
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def main() -> None:
    """Train with parameters, gradients and optimizer state sharded over all ranks."""
    arguments = flags(__doc__).parse_args()
    device = own_device()
    torch.manual_seed(0)
    dist.init_process_group("nccl", device_id=device)
    with torch.device("meta"):
        model = Transformer(arguments.width, arguments.layers, arguments.sequence)
    shard(model)
    materialize(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence + 1)).to(device)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        print_memory(step, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
