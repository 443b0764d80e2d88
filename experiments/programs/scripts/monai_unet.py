"""Train a network of MONAI with its Dice loss."""

import torch
from monai.losses import DiceLoss
from monai.networks.nets import UNet

model = UNet(
    spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
).cuda()
loss = DiceLoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    labels = torch.zeros(1, 1, 16, 16, 16).cuda()
    loss(model(torch.randn(1, 1, 16, 16, 16).cuda()), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 4)
