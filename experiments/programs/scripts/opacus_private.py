"""Train with differential privacy."""

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(20, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 20), torch.randint(2, (64,))), batch_size=16)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for x, y in loader:
    torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", len(loader))
