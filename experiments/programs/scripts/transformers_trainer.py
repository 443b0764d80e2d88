"""Train a small Llama with the Trainer of transformers, with accumulation and evaluation."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = torch.randint(100, (16,))
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
arguments = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    logging_strategy="no",
)
trainer = Trainer(
    LlamaForCausalLM(config), arguments, train_dataset=Texts(32), eval_dataset=Texts(8)
)
trainer.train()
print("true steps", trainer.state.global_step)
