"""Train with the 8-bit Adam of bitsandbytes."""

import bitsandbytes
import torch

model = torch.nn.Linear(256, 256).cuda()
optimizer = bitsandbytes.optim.Adam8bit(model.parameters(), min_8bit_size=16)
for _ in range(6):
    model(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 6)
