"""examples/resnet50.py on a phantom H100: its peak is what its layers keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resnet50.py"
BATCH, GIB = 64, 2**30


def peak(environment: dict[str, str], *flags: str) -> float:
    """Return the peak of allocated GiB that the example prints."""
    done = run_on_phantom(
        EXAMPLE,
        *("--steps", "2", "--batch", str(BATCH)),
        *flags,
        memory="h100-80gb",
        environment=environment,
    )
    assert done.returncode == 0, done.stderr
    match = re.search(r"step +2 .*peak +([\d.]+)", done.stdout)
    assert match, done.stdout
    return float(match[1])


def kept() -> int:
    """Return the elements kept for one image: the inputs of convolutions and batch norms.

    A pooling layer also keeps the index of each maximum, as 64-bit numbers (two elements).
    """
    elements = 3 * 224**2 + 2 * 64 * 112**2 + (1 + 2) * 64 * 56**2
    inputs, size = 64, 56
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            before, size = size, size // 2 if stage and not block else size
            shortcut = 0 if block else 4 * width * size**2
            elements += (
                2 * width * before**2 + 2 * width * size**2 + 2 * 4 * width * size**2 + shortcut
            )
            inputs = 4 * width
    return elements + inputs


def test_the_peak_matches_the_formula(environment: dict[str, str]) -> None:
    """In single precision, the peak is activations, weights, momentum and at most a tenth more."""
    weights = 25_557_032
    minimum = 4 * (BATCH * kept() + 2 * weights) / GIB

    assert minimum <= peak(environment) < 1.1 * minimum + 4 * weights / GIB


def test_each_variant_takes_less(environment: dict[str, str]) -> None:
    """Mixed precision halves the activations, and recomputing them saves more."""
    single, mixed, recomputed = (
        peak(environment),
        peak(environment, "--amp"),
        peak(environment, "--amp", "--checkpoint"),
    )

    assert 0.5 < mixed / single < 0.6
    assert recomputed < 0.6 * mixed
