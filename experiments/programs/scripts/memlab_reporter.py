"""Train beside the memory reporter and the line profiler of pytorch_memlab."""

import io
from contextlib import redirect_stdout

import torch
from pytorch_memlab import LineProfiler, MemReporter


def train():
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        model(torch.randn(8, 64, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


with LineProfiler(train):
    model = train()
with redirect_stdout(io.StringIO()):
    MemReporter(model).report()
print("true steps", 8)
