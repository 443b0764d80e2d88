"""Train a model of timm with its own optimizer factory and loss."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

model = timm.create_model("resnet18", num_classes=10).cuda()
optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3)
loss = LabelSmoothingCrossEntropy()
for _ in range(4):
    loss(model(torch.randn(2, 3, 64, 64).cuda()), torch.randint(10, (2,)).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 4)
