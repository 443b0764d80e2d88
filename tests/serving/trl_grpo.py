"""A script for test_trl.py: TRL's GRPO with vLLM in its own process, which sleeps while it trains.

It prints a line of JSON after each step, with what the exporter says while the engine sleeps.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ADDRESS, FOLDER, OUT = sys.argv[1:4]
STEPS = 4


def make_model(folder: str) -> None:
    """Write a small Llama with random weights, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(1000)}
    tokenizer = Tokenizer(models.WordLevel(words | {"<pad>": 1000, "<eos>": 1001}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        vocab_size=1024,
        max_position_embeddings=512,
        pad_token_id=1000,
        bos_token_id=1001,
        eos_token_id=1001,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def length(completions: list[str], **_: Any) -> list[float]:
    """Reward the length."""
    return [float(len(completion)) for completion in completions]


def main() -> None:
    """Train some steps."""
    make_model(FOLDER)
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    # A GPU that computes nothing returns masks that select nothing.
    grpo_trainer.nanmin = grpo_trainer.nanmax = torch.nanmean
    # To compile takes minutes, and TRL has no argument for it.
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)

    class Note(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(3)
            text = urlopen(f"http://{ADDRESS}/metrics").read().decode()
            with Path(OUT).open("a") as lines:
                lines.write(json.dumps({"state": f"step {state.global_step}", "text": text}) + "\n")

    trainer = GRPOTrainer(
        model=FOLDER,
        reward_funcs=length,
        args=GRPOConfig(
            output_dir=f"{FOLDER}-out",
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=256,
            max_completion_length=32,
            per_device_train_batch_size=4,
            num_generations=4,
            max_steps=STEPS,
            save_strategy="no",
            report_to=[],
            bf16=True,
            run_name="tiny-grpo",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3 w4"] * 64}),
        callbacks=[Note()],
    )
    trainer.train()
    print("trained", trainer.state.global_step, flush=True)


if __name__ == "__main__":
    main()
