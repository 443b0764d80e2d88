"""Fit a classifier of skorch."""

import numpy as np
import torch
from skorch import NeuralNetClassifier

net = NeuralNetClassifier(
    torch.nn.Sequential(torch.nn.Linear(20, 2), torch.nn.Softmax(dim=-1)),
    max_epochs=3,
    batch_size=16,
    device="cuda",
    train_split=None,
    verbose=0,
)
net.fit(np.random.randn(64, 20).astype("float32"), np.random.randint(0, 2, 64))
print("true steps", 3 * 4)
