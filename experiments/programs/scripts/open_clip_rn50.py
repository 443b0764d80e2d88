"""Train a small model of OpenCLIP with its own loss."""

import open_clip
import torch

config = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 8, "head_width": 32},
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 100,
        "width": 64,
        "heads": 2,
        "layers": 1,
    },
}
model = open_clip.model.CLIP(**config).cuda()
loss = open_clip.loss.ClipLoss()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    images, texts = torch.randn(4, 3, 32, 32).cuda(), torch.randint(100, (4, 16)).cuda()
    loss(*model(images, texts)[:3]).backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 4)
