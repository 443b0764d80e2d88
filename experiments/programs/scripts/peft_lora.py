"""Train adapters of PEFT on a small Llama."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj"])).cuda()
optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
for _ in range(5):
    tokens = torch.randint(100, (2, 16)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 5)
