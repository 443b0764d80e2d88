"""Train with an optimizer that needs no schedule."""

import schedulefree
import torch

model = torch.nn.Linear(64, 8).cuda()
optimizer = schedulefree.AdamWScheduleFree(model.parameters())
optimizer.train()
for _ in range(10):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.eval()
print("true steps", 10)
