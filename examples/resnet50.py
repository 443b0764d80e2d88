"""Train a ResNet-50 on random images.

An ordinary training script with torchvision's network (25.6 M parameters, stride in the 3×3
convolution), images of 224×224, and SGD with momentum. The two lines marked `torchmem` are all that
monitoring requires.

    python examples/resnet50.py                         # single precision
    python examples/resnet50.py --amp                   # mixed precision
    python examples/resnet50.py --amp --checkpoint      # and activation checkpointing
    python -m torchmem.phantom --memory 80GB -- python examples/resnet50.py    # without a GPU
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch's documentation uses)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem

BLOCKS, WIDTHS, CLASSES = (3, 4, 6, 3), (64, 128, 256, 512), 1000
GIB = 2**30


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution, padded to keep the image size, and its batch normalization."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """A residual block: 1×1 to `width` channels, 3×3, and 1×1 to four times the width."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        )
        changes = stride > 1 or inputs != 4 * width
        self.shortcut = (
            nn.Sequential(*convolution(inputs, 4 * width, 1, stride)) if changes else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform images of shape (batch, channels, height, width)."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    """A stem, 16 bottlenecks in four stages, a classifier; optionally with checkpointing."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.stem = nn.Sequential(
            *convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        inputs, blocks = 64, []
        for stage, (count, width) in enumerate(zip(BLOCKS, WIDTHS, strict=True)):
            for block in range(count):
                blocks.append(Bottleneck(inputs, width, stride=2 if stage and not block else 1))
                inputs = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (batch, 3, height, width) as (batch, 1000)."""
        x = self.stem(images)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x.mean((2, 3)))


def show(step: int) -> None:
    """Print allocated, peak and reserved memory."""
    allocated, peak = torch.cuda.memory_allocated() / GIB, torch.cuda.max_memory_allocated() / GIB
    reserved = torch.cuda.memory_reserved() / GIB
    print(
        f"step {step:5}  allocated {allocated:6.2f} GiB  peak {peak:6.2f}"
        f"  reserved {reserved:6.2f}",
        flush=True,
    )


def train(arguments: argparse.Namespace) -> None:
    """Train for `steps` optimizer steps and print the memory every five steps."""
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    model = ResNet50(checkpointing=arguments.checkpoint).cuda().to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=arguments.amp)
    for step in range(1, arguments.steps + 1):
        images = torch.randn(arguments.batch, 3, 224, 224).cuda().to(memory_format=layout)
        labels = torch.randint(CLASSES, (arguments.batch,)).cuda()
        with torch.autocast("cuda", dtype=torch.float16, enabled=arguments.amp):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0 or step == arguments.steps:
            show(step)


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="images per batch (default: %(default)s)"
    )
    parser.add_argument(
        "--amp", action="store_true", help="mixed precision: float16 with loss scaling"
    )
    parser.add_argument(
        "--checkpoint", action="store_true", help="recompute each block's activations when needed"
    )
    parser.add_argument(
        "--channels-last", action="store_true", help="keep images as NHWC in memory"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "No CUDA: run this on a GPU, or with python -m torchmem.phantom (docs/phantom.md).",
            file=sys.stderr,
        )
        raise SystemExit(2)
    torch.manual_seed(0)
    train(arguments)


if __name__ == "__main__":
    main()
