"""Train a transformer with pipeline parallelism, one stage per rank.

The two lines marked `torchmem` are all that monitoring requires.

    torchrun --nproc-per-node 4 examples/pipeline.py
    torchmem preflight --gpu-model h100-80gb --world-size 4 --rank 3 -- \
        python examples/pipeline.py                                         # without a GPU
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformer import VOCABULARY, Transformer, flags, next_token_loss, own_device, print_memory

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem


class Stage(nn.Module):
    """One rank's blocks, with the embeddings on the first rank and the head on the last."""

    def __init__(self, model: Transformer, stage: int, stages: int) -> None:
        super().__init__()
        each = -(-len(model.blocks) // stages)
        first, last = stage == 0, stage == stages - 1
        self.tokens = model.tokens if first else None
        self.positions = model.positions if first else None
        self.blocks = nn.Sequential(*model.blocks[stage * each : (stage + 1) * each])
        self.norm, self.head = (model.norm, model.head) if last else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens or hidden states to hidden states or, in the last stage, to logits."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if self.tokens is not None and self.positions is not None:
                x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
            return self.head(self.norm(self.blocks(x)))


def pipeline_stage(
    module: Stage, arguments: argparse.Namespace, device: torch.device
) -> PipelineStage:
    """Return the stage with the shapes of its inputs and outputs, which saves a shape exchange."""
    rank, stages, length = dist.get_rank(), dist.get_world_size(), arguments.sequence
    tokens = torch.empty(1, length, dtype=torch.long, device="meta")
    hidden = torch.empty(1, length, arguments.width, device="meta", requires_grad=True)
    scores = torch.empty(
        1, length, VOCABULARY, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    inputs = tokens if rank == 0 else hidden
    outputs = scores if rank == stages - 1 else hidden
    return PipelineStage(module, rank, stages, device, input_args=(inputs,), output_args=(outputs,))


def main() -> None:
    """Train with one microbatch per sequence."""
    arguments = flags(__doc__).parse_args()
    device = own_device()
    dist.init_process_group("nccl", device_id=device)
    with torch.device("meta"):
        model = Transformer(arguments.width, arguments.layers, arguments.sequence)
    module = Stage(model, dist.get_rank(), dist.get_world_size()).to_empty(device=device)
    schedule = Schedule1F1B(
        pipeline_stage(module, arguments, device), arguments.batch, next_token_loss
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence + 1)).to(device)
        inputs = (tokens[:, :-1],) if dist.get_rank() == 0 else ()
        is_last = dist.get_rank() == dist.get_world_size() - 1
        schedule.step(*inputs, **{"target": tokens[:, 1:]} if is_last else {})
        optimizer.step()
        optimizer.zero_grad()
        print_memory(step, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
