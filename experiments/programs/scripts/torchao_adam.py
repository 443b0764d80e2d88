"""Train with the 8-bit AdamW of torchao, which is plain PyTorch where nothing is compiled."""

import torch
from torchao.optim import AdamW8bit

torch.compiler.set_stance("force_eager")
model = torch.nn.Linear(256, 256).cuda()
optimizer = AdamW8bit(model.parameters())
for _ in range(5):
    model(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 5)
