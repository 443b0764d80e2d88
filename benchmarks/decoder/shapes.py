"""Shapes of decoders like Llama, from 0.1 to 70 billion parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Hidden size, layers, heads, key-value heads, and width of the feed-forward network."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


SHAPES = {
    "0.1B": Shape(768, 12, 12, 12, 2048),
    "1B": Shape(2048, 22, 32, 4, 5632),
    "7B": Shape(4096, 32, 32, 32, 11008),
    "13B": Shape(5120, 40, 40, 40, 13824),
    "30B": Shape(6656, 60, 52, 52, 17920),
    "70B": Shape(8192, 80, 64, 8, 28672),
}
"""From 1B on: TinyLlama 1.1B and Llama with 7, 13, 32.5 and 70 billion parameters, as in their
papers."""
