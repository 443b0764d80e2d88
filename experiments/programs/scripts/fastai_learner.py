"""Fit a learner of fastai."""

import torch
from fastai.callback import progress  # noqa: F401 - adds no_bar
from fastai.data.core import DataLoaders
from fastai.learner import Learner

pairs = [(torch.randn(8), torch.randn(8)) for _ in range(24)]
loaders = DataLoaders.from_dsets(pairs[:16], pairs[16:], bs=4, device="cuda", num_workers=0)
learner = Learner(loaders, torch.nn.Linear(8, 8).cuda(), loss_func=torch.nn.MSELoss())
with learner.no_bar(), learner.no_logging():
    learner.fit(2)
print("true steps", 2 * 4)
