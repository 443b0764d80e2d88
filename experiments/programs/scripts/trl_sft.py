"""Fine-tune with TRL's SFTTrainer."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl_common import QUIET, model, tokenizer

texts = Dataset.from_list([{"text": f"w{n} w{n + 1} w{n + 2}"} for n in range(12)])
trainer = SFTTrainer(
    model(), SFTConfig(max_steps=5, **QUIET), train_dataset=texts, processing_class=tokenizer()
)
trainer.train()
print("true steps", trainer.state.global_step)
