"""Train a small UNet of diffusers."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

model = UNet2DModel(
    sample_size=16,
    block_out_channels=(32, 32),
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
).cuda()
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    clean = torch.randn(2, 3, 16, 16, device="cuda")
    noise = torch.randn_like(clean)
    times = torch.randint(0, 100, (2,)).cuda()
    noisy = scheduler.add_noise(clean, noise, torch.tensor([3, 4]))
    torch.nn.functional.mse_loss(model(noisy, times).sample, noise).backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 4)
