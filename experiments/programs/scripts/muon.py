"""Train with torch.optim.Muon for matrices and AdamW for the rest."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
matrices = [each for each in model.parameters() if each.ndim == 2]
others = [each for each in model.parameters() if each.ndim != 2]
optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
for _ in range(9):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print("true steps", 9)
