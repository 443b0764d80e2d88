"""Train and log to Weights & Biases, offline."""

import torch
import wandb

wandb.init(mode="offline", project="programs")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wandb.log({"step": step})
wandb.finish()
print("true steps", 8)
