"""Train on images that kornia augments on the GPU."""

import torch
from kornia.augmentation import AugmentationSequential, Normalize, RandomHorizontalFlip

augment = AugmentationSequential(RandomHorizontalFlip(p=1.0), Normalize(0.5, 0.5))
model = torch.nn.Conv2d(3, 8, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(augment(torch.rand(2, 3, 32, 32).cuda())).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 5)
