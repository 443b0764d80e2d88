"""Train a vision transformer with Lightning's Trainer.

An ordinary LightningModule with random images, bf16 mixed precision, gradient clipping and AdamW.
The two lines marked `torchmem` are all that monitoring requires.

    pip install lightning
    python examples/lightning_loop.py --steps 200
    python -m torchmem.phantom --memory 9GB -- \
        python examples/lightning_loop.py --steps 20 --accumulate 4
    torchmem preflight --gpu-model 9GB --steps 10 -- python examples/lightning_loop.py --batch 128
"""

from __future__ import annotations

import argparse
import sys

import lightning
import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch's documentation uses)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem

PATCHES, PATCH, CLASSES, HEADS = 196, 768, 1000, 12
GIB = 2**30


class RandomImages(Dataset[tuple[Tensor, int]]):
    """Images of 224×224 pixels in patches of 16×16, with their class, reproducible by index."""

    def __init__(self, images: int) -> None:
        self.images = images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(
            PATCHES, PATCH, generator=torch.Generator().manual_seed(index)
        ), index % CLASSES


class VisionTransformer(lightning.LightningModule):
    """An encoder of patches, and a linear classifier of their mean."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, width)
        self.positions = nn.Parameter(torch.zeros(PATCHES, width))
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        """Return the logits of images of shape (batch, patches, pixels)."""
        hidden: Tensor = self.encoder(self.patches(patches) + self.positions)
        return self.head(hidden.mean(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the mean cross-entropy of one batch."""
        patches, classes = batch
        loss = F.cross_entropy(self(patches), classes)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(steps: int, accumulate: int) -> lightning.Trainer:
    """Return a Trainer for one GPU that writes nothing to disk."""
    return lightning.Trainer(
        max_epochs=1,
        max_steps=steps,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--steps", type=int, default=200, help="optimizer steps (default: %(default)s)"
    )
    flags.add_argument(
        "--batch", type=int, default=64, help="images per batch (default: %(default)s)"
    )
    flags.add_argument(
        "--accumulate",
        type=int,
        default=1,
        help="batches per optimizer step (default: %(default)s)",
    )
    flags.add_argument(
        "--width",
        type=int,
        default=768,
        help="hidden size, a multiple of 12 (default: %(default)s)",
    )
    flags.add_argument(
        "--layers", type=int, default=12, help="encoder layers (default: %(default)s)"
    )
    return flags


def main() -> None:
    """Parse the flags, train, and print the peak memory."""
    flags = parser().parse_args()
    if not torch.cuda.is_available():
        print(
            "No CUDA: run this on a GPU, or with python -m torchmem.phantom (docs/phantom.md).",
            file=sys.stderr,
        )
        raise SystemExit(2)
    data = DataLoader(RandomImages(flags.steps * flags.batch * flags.accumulate), flags.batch)
    trainer(flags.steps, flags.accumulate).fit(VisionTransformer(flags.width, flags.layers), data)
    allocated, reserved = (
        torch.cuda.max_memory_allocated() / GIB,
        torch.cuda.max_memory_reserved() / GIB,
    )
    print(f"peak allocated {allocated:.2f} GiB  peak reserved {reserved:.2f} GiB")


if __name__ == "__main__":
    main()
