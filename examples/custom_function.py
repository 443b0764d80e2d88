"""Train with a custom autograd Function that does not store the logits of a large vocabulary.

The last layer of this language model computes logits for 128,256 tokens at every position. For
8,192 positions these are 2 GiB in bf16, and cross-entropy needs more in fp32. With `--fused`,
projection and loss are computed together, some positions at a time, with their gradients, so that
only tensors of the size of the layer's input and weight are saved for the backward pass. The
phantom GPU shows without a GPU how much memory that saves and whether a larger batch fits. The two
lines marked `torchmem` are all that monitoring requires.

    python examples/custom_function.py --fused
    python -m torchmem.phantom --memory 24GB -- python examples/custom_function.py
    python -m torchmem.phantom --memory 24GB -- python examples/custom_function.py --fused
    torchmem preflight --gpu-model 24GB --steps 5 -- \
        python examples/custom_function.py --fused --positions 65536
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch's documentation uses)
from torch import Tensor, nn

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem

VOCABULARY, WIDTH = 128_256, 2048
GIB = 2**30


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, `chunk` positions at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        """Return the loss of hidden (positions, width), weight (vocabulary, width), targets."""
        loss = torch.zeros((), device=hidden.device)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(targets), chunk):
            part, labels = hidden[start : start + chunk], targets[start : start + chunk]
            scores = F.linear(part, weight).float()
            loss += F.cross_entropy(scores, labels, reduction="sum") / len(targets)
            grad = scores.softmax(dim=1)
            grad[torch.arange(len(labels), device=grad.device), labels] -= 1
            grad = (grad / len(targets)).to(part.dtype)
            grad_hidden[start : start + chunk] = grad @ weight.to(part.dtype)
            grad_weight += grad.t() @ part
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients that `forward` has computed."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None


class Model(nn.Module):
    """An embedding, one feed-forward network and the head, with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, tokens: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
        """Return the mean cross-entropy of the targets; with `chunk`, use the custom Function."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = self.mlp(self.tokens(tokens))
            if chunk:
                return FusedLinearCrossEntropy.apply(hidden, self.head.weight, targets, chunk)
            return F.cross_entropy(self.head(hidden), targets)


def train(steps: int, positions: int, chunk: int | None) -> None:
    """Train for `steps` optimizer steps."""
    with torch.device("cuda"):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (positions + 1,)).cuda()
        model.loss(tokens[:-1], tokens[1:], chunk).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Parse the flags, train, and print the peak memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--positions", type=int, default=8192, help="tokens per batch (default: %(default)s)"
    )
    parser.add_argument(
        "--fused", action="store_true", help="projection and loss in one custom Function"
    )
    parser.add_argument(
        "--chunk", type=int, default=1024, help="positions at a time (default: %(default)s)"
    )
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "No CUDA: run this on a GPU, or with python -m torchmem.phantom (docs/phantom.md).",
            file=sys.stderr,
        )
        raise SystemExit(2)
    train(flags.steps, flags.positions, flags.chunk if flags.fused else None)
    allocated, reserved = (
        torch.cuda.max_memory_allocated() / GIB,
        torch.cuda.max_memory_reserved() / GIB,
    )
    print(f"peak allocated {allocated:.2f} GiB  peak reserved {reserved:.2f} GiB")


if __name__ == "__main__":
    main()
