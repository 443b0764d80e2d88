"""Train with DeepSpeed's engine and ZeRO stage 2, under its launcher."""

import deepspeed
import torch

model = torch.nn.Linear(64, 64)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
for _ in range(6):
    engine.backward(engine(torch.randn(4, 64).to(engine.device)).mean())
    engine.step()
print("true steps", 6)
