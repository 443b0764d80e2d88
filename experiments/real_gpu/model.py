"""Train a public model with random weights: `python model.py NAME [FRACTION]`.

FRACTION is that of the GPU which the process may use. The last line printed is JSON: whether it ran
to its end, and the peaks of the allocator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

STEPS = 3
IMAGES, SEQUENCES, TOKENS = 32, 8, 512
Loss = Callable[[], Any]


def vision(name: str) -> tuple[Any, Loss]:
    """Return a classifier of torchvision, and its loss for a batch of images."""
    import torchvision

    model = getattr(torchvision.models, name)().cuda()
    images = torch.ones(IMAGES, 3, 224, 224, device="cuda")
    labels = torch.zeros(IMAGES, dtype=torch.long, device="cuda")
    return model, lambda: torch.nn.functional.cross_entropy(model(images), labels)


def text(config: str, model_class: str, **settings: int) -> tuple[Any, Loss]:
    """Return a model of transformers from its configuration, and its loss for a batch of tokens."""
    import transformers

    made = getattr(transformers, config)(**settings)
    model = getattr(transformers, model_class)(made).cuda().train()
    tokens = torch.ones(SEQUENCES, TOKENS, dtype=torch.long, device="cuda")
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, Callable[[], tuple[Any, Loss]]] = {
    "resnet50": lambda: vision("resnet50"),
    "vit_b_16": lambda: vision("vit_b_16"),
    "gpt2": lambda: text("GPT2Config", "GPT2LMHeadModel"),
    "bert-base": lambda: text("BertConfig", "BertForMaskedLM"),
    "t5-small": lambda: text("T5Config", "T5ForConditionalGeneration", decoder_start_token_id=0),
}


def train(name: str) -> None:
    """Take a few steps."""
    with torch.device("cuda"):
        model, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def main(name: str, fraction: str = "1") -> None:
    """Train, and print the peaks."""
    torch.cuda.set_per_process_memory_fraction(float(fraction))
    fits = True
    try:
        train(name)
    except torch.OutOfMemoryError:
        fits = False
    stats = torch.cuda.memory_stats()
    peaks = [stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")]
    print(json.dumps([fits, *peaks]))


if __name__ == "__main__":
    main(*sys.argv[1:])
