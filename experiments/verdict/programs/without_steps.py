"""Jobs without an optimizer of PyTorch, so that nothing tells where a step ends."""

from __future__ import annotations

import torch
from experiments.verdict.programs.job import Job, take
from torch import Tensor, nn


def custom_optimizer(job: Job) -> None:
    """Parameters are updated by hand, and outputs are kept."""
    module, width = job.module(job.share(0.02, 0.12), copies=2)
    rows = job.share(0.02, 0.1) // (8 * len(module) * width)
    outputs = []
    while True:
        for _ in job.steps():
            output = module(torch.rand(rows, width, device="cuda"))  # guilty
            output.square().mean().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-0.001)
                    parameter.grad = None
            outputs.append(output[:1].tolist() if job.cured("drop") else output)


def blocks_of_requests(job: Job) -> None:
    """Inference with gradients enabled keeps a block for each request, until it is answered."""
    model = nn.Linear(256, 256, device="cuda")
    full, blocks = job.share(0.72, 0.8), list[Tensor]()
    for _ in job.steps(6 * job.most):
        size = int(job.free * min(0.15, job.draw.lognormvariate(-4.2, 0.9)))
        while blocks and sum(map(len, blocks)) + size > full:
            blocks.pop(job.draw.randrange(len(blocks)))
        blocks.append(take(size))
        model(torch.rand(8, 256, device="cuda"))


def more_requests(job: Job) -> None:
    """Inference answers more and more requests at once."""
    module, width = job.module(job.share(0.05, 0.4), copies=1)
    each, requests = max(1, job.free // job.most // (8 * width)), 0
    with torch.no_grad():
        while True:
            for _ in job.steps():
                requests += 1 if not job.cured("smaller", "bound") else requests < 4
                module(torch.rand(each * requests, width, device="cuda"))
