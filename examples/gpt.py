"""Train a small GPT on random text of varying length.

An ordinary training script with 135 M parameters, bf16 autocast and AdamW. Sequence lengths vary
between batches, which fragments the memory of a GPU. The two lines marked `torchmem` are all that
monitoring requires.

    python examples/gpt.py --steps 200
    python -m torchmem.phantom --memory 9GB -- python examples/gpt.py --steps 200    # without a GPU
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch's documentation uses)
from torch import Tensor, nn

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem

VOCABULARY, WIDTH, HEADS, LAYERS = 32_000, 768, 12, 12
MIN_LENGTH, MAX_LENGTH, MULTIPLE = 256, 1016, 8
GIB = 2**30


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform hidden states of shape (batch, length, width)."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only language model with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens (batch, length) as (batch, length, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def sequence_lengths(steps: int, seed: int) -> list[int]:
    """Return the sequence length of every step, uniformly distributed and reproducible."""
    lengths = random.Random(seed)  # noqa: S311  (training data, not cryptography)
    return [lengths.randrange(MIN_LENGTH, MAX_LENGTH + 1, MULTIPLE) for _ in range(steps)]


def loss(model: GPT, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def train(steps: int, batch: int, seed: int) -> None:
    """Train for `steps` optimizer steps and print the memory every ten steps."""
    torch.manual_seed(seed)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step, length in enumerate(sequence_lengths(steps, seed), start=1):
        tokens = torch.randint(VOCABULARY, (batch, length + 1)).cuda()
        loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            allocated, reserved = (
                torch.cuda.memory_allocated() / GIB,
                torch.cuda.memory_reserved() / GIB,
            )
            print(
                f"step {step:5}  allocated {allocated:6.2f} GiB  reserved {reserved:6.2f} GiB",
                flush=True,
            )


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences per batch (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "No CUDA: run this on a GPU, or with python -m torchmem.phantom (docs/phantom.md).",
            file=sys.stderr,
        )
        raise SystemExit(2)
    train(arguments.steps, arguments.batch, arguments.seed)


if __name__ == "__main__":
    main()
