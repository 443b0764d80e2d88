"""Small made-up data sets, in the files that public example scripts read."""

from __future__ import annotations

import pickle
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES, IMAGE_PIXELS, DIGITS, DIGIT_PIXELS = 16, 320, 256, 28
WORDS, CHARACTERS = 8192, 40_000
SEED, MNIST_DIGITS = 0, 60_000


def nothing(folder: Path) -> None:
    """Create an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)


def mnist(folder: Path, digits: int = DIGITS) -> None:
    """Write MNIST's four files with random pixels."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    for part in ("train", "t10k"):
        images = rng.integers(0, 256, (digits, DIGIT_PIXELS, DIGIT_PIXELS), dtype=np.uint8)
        _idx(raw / f"{part}-images-idx3-ubyte", images)
        _idx(raw / f"{part}-labels-idx1-ubyte", np.arange(digits) % 10)


def whole_mnist(folder: Path) -> None:
    """Write MNIST with as many digits as the real one has for training."""
    mnist(folder, MNIST_DIGITS)


def images(folder: Path) -> None:
    """Write JPEGs as an image folder: two classes in train and in val."""
    rng = np.random.default_rng(SEED)
    for part in ("train", "val"):
        for number in range(IMAGES):
            pixels = rng.integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
            path = folder / part / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


def bsds(folder: Path) -> None:
    """Write images where the example of super-resolution looks for BSDS300."""
    images(folder)
    (folder / "val").rename(folder / "test")
    for path in [*folder.glob("*/*/*.jpg")]:
        path.rename(path.parents[1] / f"{path.parent.name}-{path.name}")


def wikitext(folder: Path) -> None:
    """Write the three files of a text corpus."""
    rng = np.random.default_rng(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "valid", "test"):
        words = [f"w{number}" for number in rng.integers(0, 500, WORDS)]
        lines = (" ".join(words[at : at + 20]) for at in range(0, WORDS, 20))
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")


def characters(folder: Path) -> None:
    """Write a text, its characters as numbers, and the table of the characters."""
    rng = np.random.default_rng(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = string.ascii_lowercase + " \n"
    text = "".join(alphabet[at] for at in rng.integers(0, len(alphabet), CHARACTERS))
    (folder / "input.txt").write_text(text)
    numbers = {character: number for number, character in enumerate(alphabet)}
    for part in ("train", "val"):
        np.array([numbers[c] for c in text], dtype=np.uint16).tofile(folder / f"{part}.bin")
    table = {
        "vocab_size": len(alphabet),
        "stoi": numbers,
        "itos": {number: character for character, number in numbers.items()},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(table))


def sine_waves(folder: Path) -> None:
    """Write the waves of the example of time sequences."""
    import torch

    torch.save(np.sin(np.arange(100 * 200).reshape(100, 200) / 20.0), folder / "traindata.pt")


def vgg16(folder: Path) -> None:
    """Write untrained weights in place of those that torchvision would download."""
    import torch
    from torchvision.models import vgg16 as model

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model().state_dict(), folder / "vgg16-397923af.pth")


def resnet18(folder: Path) -> None:
    """Write the untrained weights of timm's ResNet-18."""
    import timm
    import torch

    torch.save(timm.create_model("resnet18").state_dict(), folder / "resnet18.pth")


Data = tuple[Callable[[Path], None], str]
"""What writes the data, and the folder in the copy of the checkout."""


def _idx(path: Path, array: np.ndarray) -> None:
    """Write an array of bytes in MNIST's format."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())
