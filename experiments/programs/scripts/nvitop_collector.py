"""Train beside nvitop's collector of resource metrics."""

import torch
from nvitop import ResourceMetricCollector
from training import train

torch.zeros(1, device="cuda")
with ResourceMetricCollector(interval=0.5)(tag="train") as collector:
    steps = train()
    print("metrics", bool(collector.collect()))
print("true steps", steps)
