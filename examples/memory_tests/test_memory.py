"""Memory tests of a Hugging Face model, of a training step with FSDP2, and of a block of code.

They need no download and no GPU:

    pip install transformers pytest
    pytest --gpu-memory --gpu-memory-report examples/memory_tests
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

GIB = 2**30


def llama(layers: int = 4) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(model: Any, steps: int = 2) -> None:
    """Train on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        tokens = torch.randint(8000, (4, 512), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def process_group() -> Iterator[None]:
    """The default process group, on the GPU of this rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


@pytest.mark.gpu_memory(peak="1.5 GiB")
def test_training_step() -> None:
    """A training step fits in 1.5 GiB."""
    model = llama().cuda()
    train(model)


@pytest.mark.gpu_memory(peak="1 GiB")
def test_checkpointing_saves_activations(gpu_memory: Callable[..., Any]) -> None:
    """With activation checkpointing, a step needs less than without it."""
    peaks = []
    for is_checkpointed in (False, True):
        model = llama().cuda().to(torch.bfloat16)
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        with gpu_memory(peak="1 GiB") as used:
            train(model)
        peaks.append(used.components["activations"])
        del model
    assert peaks[1] < peaks[0]


@pytest.mark.gpu_memory(peak="800 MiB", world_size=8, rank=0)
@pytest.mark.usefixtures("process_group")
def test_fsdp2_rank() -> None:
    """Rank 0 of 8 with FSDP2 fits in 800 MiB."""
    with torch.device("meta"):
        model = llama()
    for module in [*model.model.layers, model]:
        fully_shard(module)
    model.to_empty(device="cuda")
    train(model)


@pytest.mark.gpu_memory(leak="1 MiB")
def test_generation_leaks_nothing() -> None:
    """After generation, nothing but the model stays allocated."""
    model = llama(layers=2).cuda().eval()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 128, dtype=torch.long, device="cuda"))
    del model
