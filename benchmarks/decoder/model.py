"""A decoder like Llama: grouped heads, RMSNorm, a gated feed-forward network, no biases."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as in PyTorch's documentation
from benchmarks.decoder.shapes import Shape
from torch import Tensor, nn

VOCABULARY = 32_000


class Layer(nn.Module):
    """Causal self-attention and a gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.splits = [shape.width, shape.kv_heads * self.head, shape.kv_heads * self.head]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, sum(self.splits), bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform hidden states of shape (batch, length, width)."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(self.splits, dim=-1)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A language model, created on the default device with the default dtype."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens (batch, length) as (batch, length, vocabulary)."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def new_decoder(shape: Shape, device: str) -> Decoder:
    """Return the decoder in bf16 on a device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Decoder(shape)
    finally:
        torch.set_default_dtype(before)


def step(model: Decoder, optimizer: Any, batch: int, length: int) -> None:
    """Run forward, backward and optimizer."""
    device = model.head.weight.device
    tokens = torch.randint(VOCABULARY, (batch, length + 1), device=device)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
