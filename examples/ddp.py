"""Train a transformer with DistributedDataParallel.

The two lines marked `torchmem` are all that monitoring requires.

    torchrun --nproc-per-node 8 examples/ddp.py
    torchmem preflight --gpu-model h100-80gb --world-size 8 -- python examples/ddp.py  # no GPU
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformer import VOCABULARY, Transformer, flags, next_token_loss, own_device, print_memory

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem


def main() -> None:
    """Train the whole model on every rank and average the gradients in buckets."""
    arguments = flags(__doc__).parse_args()
    device = own_device()
    dist.init_process_group("nccl", device_id=device)
    model = Transformer(arguments.width, arguments.layers, arguments.sequence).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence + 1)).to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = next_token_loss(parallel(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print_memory(step, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
