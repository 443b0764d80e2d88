"""A decoder-only transformer for the examples of distributed training."""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch's documentation uses)
from torch import Tensor, nn

VOCABULARY = 32_000
HEAD_SIZE = 128
GIB = 2**30


class Block(nn.Module):
    """One layer: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform hidden states (batch, length, width), with all or some of the heads."""
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            linear(normed).view(batch, length, -1, HEAD_SIZE).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Token and position embeddings, `layers` blocks, and a head."""

    def __init__(self, width: int, layers: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens (batch, length) as (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of scores (batch, length, vocabulary) and token targets."""
    return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def flags(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the flags that the examples share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="hidden size (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="transformer blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--sequence", type=int, default=1024, help="tokens in a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences of one rank's batch (default: %(default)s)"
    )
    return parser


def own_device() -> torch.device:
    """Select and return this rank's GPU. Exit without torchrun or without a GPU."""
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        raise SystemExit(
            "Start this with torchrun on GPUs, or with torchmem preflight --world-size."
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def print_memory(step: int, rank: int) -> None:
    """Print the allocated and the peak memory of this rank."""
    allocated, peak = torch.cuda.memory_allocated() / GIB, torch.cuda.max_memory_allocated() / GIB
    print(
        f"rank {rank}  step {step:4}  allocated {allocated:7.2f} GiB  peak {peak:7.2f} GiB",
        flush=True,
    )
