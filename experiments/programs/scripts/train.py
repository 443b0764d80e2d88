"""Train a small model with PyTorch alone."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 12)
