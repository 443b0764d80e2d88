"""Align with TRL's DPOTrainer."""

from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl_common import QUIET, model, tokenizer

pairs = Dataset.from_list(
    [{"prompt": f"w{n}", "chosen": f" w{n + 1}", "rejected": f" w{n + 2}"} for n in range(12)]
)
trainer = DPOTrainer(
    model(),
    ref_model=model(),
    args=DPOConfig(max_steps=4, **QUIET),
    train_dataset=pairs,
    processing_class=tokenizer(),
)
trainer.train()
print("true steps", trainer.state.global_step)
