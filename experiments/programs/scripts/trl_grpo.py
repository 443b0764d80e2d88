"""Train with TRL's GRPOTrainer, which generates and trains in turn."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_common import QUIET, model, tokenizer

prompts = Dataset.from_list([{"prompt": f"w{n}"} for n in range(12)])
trainer = GRPOTrainer(
    model(),
    reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
    args=GRPOConfig(max_steps=3, num_generations=2, max_completion_length=4, **QUIET),
    train_dataset=prompts,
    processing_class=tokenizer(),
)
trainer.train()
print("true steps", trainer.state.global_step)
