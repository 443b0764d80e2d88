"""Train and keep metrics of torchmetrics on the GPU."""

import torch
from torchmetrics.classification import MulticlassAccuracy

model, metric = torch.nn.Linear(16, 4).cuda(), MulticlassAccuracy(4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    y = torch.randint(4, (8,)).cuda()
    logits = model(torch.randn(8, 16).cuda())
    torch.nn.functional.cross_entropy(logits, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    metric.update(logits.detach(), y)
metric.compute()
print("true steps", 6)
