"""Train under torch.profiler with memory and stacks, on a schedule."""

import torch
from torch.profiler import profile, schedule
from training import train

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
with profile(
    schedule=schedule(wait=1, warmup=1, active=2),
    on_trace_ready=lambda found: found.export_chrome_trace("trace.json"),
    profile_memory=True,
    with_stack=True,
) as profiler:
    for _ in range(8):
        model(torch.randn(8, 64, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
print("true steps", 8 + train(4))
