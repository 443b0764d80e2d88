"""Train a Llama of any size with Hugging Face's Trainer.

An ordinary script with random text, bf16 autocast and AdamW. The model is created from a config, so
nothing is downloaded. The two lines marked `torchmem` are all that monitoring requires. The last
two commands show without a GPU which batch fits and what activation checkpointing saves.

    pip install transformers accelerate
    python examples/huggingface.py --steps 200
    python -m torchmem.phantom --memory 24GB -- \
        python examples/huggingface.py --batch 16 --gradient-checkpointing
    torchmem preflight --gpu-model 24GB --find-batch batch=1..64 -- python examples/huggingface.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from torchmem import sdk  # torchmem

sdk.instrument()  # torchmem

VOCABULARY, HEAD = 32_000, 64
GIB = 2**30


class RandomText(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens. The same index gives the same sequence."""

    def __init__(self, sequences: int, length: int) -> None:
        self.sequences, self.length = sequences, length

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(
            VOCABULARY, (self.length,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": tokens, "labels": tokens}


def llama(width: int, layers: int, length: int) -> LlamaForCausalLM:
    """Return a Llama with heads of size 64 and a feed-forward size of 8/3 of the width."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // 256) * 256,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, data: RandomText, flags: argparse.Namespace) -> None:
    """Train for `flags.steps` optimizer steps."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=flags.steps,
            per_device_train_batch_size=flags.batch,
            gradient_checkpointing=flags.gradient_checkpointing or None,
            bf16=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--steps", type=int, default=200, help="optimizer steps (default: %(default)s)"
    )
    flags.add_argument(
        "--batch", type=int, default=8, help="sequences per batch (default: %(default)s)"
    )
    flags.add_argument(
        "--length", type=int, default=1024, help="tokens per sequence (default: %(default)s)"
    )
    flags.add_argument(
        "--width",
        type=int,
        default=768,
        help="hidden size, a multiple of 64 (default: %(default)s)",
    )
    flags.add_argument(
        "--layers", type=int, default=12, help="decoder layers (default: %(default)s)"
    )
    flags.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="recompute activations in the backward",
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
    model = llama(flags.width, flags.layers, flags.length)
    train(model, RandomText(flags.steps * flags.batch, flags.length), flags)
    allocated, reserved = (
        torch.cuda.max_memory_allocated() / GIB,
        torch.cuda.max_memory_reserved() / GIB,
    )
    print(f"peak allocated {allocated:.2f} GiB  peak reserved {reserved:.2f} GiB")


if __name__ == "__main__":
    main()
