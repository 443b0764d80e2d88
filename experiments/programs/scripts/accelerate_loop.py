"""Train with accelerate, under its launcher."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(20, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(48, 20)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for (x,) in loader:
    accelerator.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
print("true steps", steps)
accelerator.end_training()
