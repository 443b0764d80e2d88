"""Train with Composer."""

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(32, 8), torch.randint(2, (32,)))
trainer = Trainer(
    model=ComposerClassifier(torch.nn.Linear(8, 2), num_classes=2),
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="8ba",
    device="gpu",
    progress_bar=False,
)
trainer.fit()
print("true steps", int(trainer.state.timestamp.batch))
