"""Train with an engine of PyTorch Ignite."""

import torch
from ignite.engine import create_supervised_trainer

model = torch.nn.Linear(8, 1).cuda()
trainer = create_supervised_trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), device="cuda"
)
trainer.run([(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(5)], max_epochs=2)
print("true steps", 10)
