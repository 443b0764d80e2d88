"""Train with TRL's GRPOTrainer, which generates and trains in turn.

A phantom GPU computes nothing: the tokens that the model generates there are replaced, and so are
two metrics that fail without a number.
"""

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl_common import QUIET, model, tokenizer

grpo_trainer.nanmin = grpo_trainer.nanmax = torch.sum
words = tokenizer()
NEW_TOKENS = 4


def rollout(prompts, trainer):
    prompt_ids = words(prompts)["input_ids"]
    inputs = torch.tensor(prompt_ids, device=trainer.accelerator.device)
    generating = trainer.accelerator.unwrap_model(trainer.model)
    generating.generate(inputs, max_new_tokens=NEW_TOKENS, do_sample=True, use_cache=True)
    tokens = [[5 + n % 3] * NEW_TOKENS for n, _ in enumerate(prompts)]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": tokens,
        "logprobs": [[-1.0] * NEW_TOKENS for _ in tokens],
    }


trainer = GRPOTrainer(
    model(),
    reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
    args=GRPOConfig(max_steps=3, num_generations=2, max_completion_length=NEW_TOKENS, **QUIET),
    train_dataset=Dataset.from_list([{"prompt": f"w{n}"} for n in range(12)]),
    processing_class=words,
    rollout_func=rollout,
)
trainer.train()
print("true steps", trainer.state.global_step)
