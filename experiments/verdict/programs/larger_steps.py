"""Jobs whose steps need more, while nothing is kept between them; and one where nothing changes."""

from __future__ import annotations

import torch
from experiments.verdict.programs.job import Job, Network, train
from torch import nn


def longer_batches(job: Job) -> None:
    """Each batch is a little longer than the one before."""
    network = job.network(job.share(0.02, 0.15))
    rows = network.rows(job.share(0.05, 0.2))
    more = network.rows(job.share(0.8, 1.0)) / job.most
    step = 0
    while True:
        for _ in job.steps():
            step += 1
            length = int(rows + more * (step if not job.cured("bound") else min(step, 4)))
            train(network, network.module(network.batch(length)).square().mean())


def curriculum(job: Job) -> None:
    """Sequences get longer in stages."""
    network = job.network(job.share(0.02, 0.15))
    rows, stages = network.rows(job.share(0.03, 0.08)), job.draw.uniform(1.25, 1.7)
    each = max(8, job.most // 8)
    stage = 0
    while True:
        for _ in job.steps(each):
            length = int(rows * stages**stage)
            train(network, network.module(network.batch(length)).square().mean())
        stage += not job.cured("bound")


def longer_unrolling(job: Job) -> None:
    """A recurrent model is unrolled over more and more time steps."""
    width = 64 * job.draw.randint(4, 16)
    cell = nn.GRUCell(width, width, device="cuda")
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    rows = max(1, job.share(0.004, 0.012) // (width * 4 * 8))
    length = 2
    while True:
        for _ in job.steps():
            length += not job.cured("bound")
            hidden = torch.zeros(rows, width, device="cuda")
            for _ in range(length):
                hidden = cell(torch.rand(rows, width, device="cuda"), hidden)
            hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def long_batch(job: Job) -> None:
    """One batch is much longer than all others."""
    network = job.network(job.share(0.02, 0.15))
    rows = network.rows(job.share(0.1, 0.25))
    at = job.draw.randint(job.most // 3, job.most)
    for step in job.steps(at + 20):
        is_usual = step < at or job.cured("bound")
        length = job.draw.uniform(0.9, 1.0) if is_usual else job.draw.uniform(5, 9)
        train(network, network.module(network.batch(int(rows * length))).square().mean())


def tight(job: Job) -> None:
    """Images have about 40 regions each, and one with some more does not fit."""
    size = job.share(0.05, 0.3)
    network = job.network(size, layers=2)
    region, spread = network.rows((job.free - size) / 60), job.draw.uniform(1.0, 1.4)
    for _ in range(2):  # the second has the optimizer's state
        _detect(network, region, 20)
    each = (torch.cuda.max_memory_allocated() - size) / 20
    most = (0.96 * job.free - size) / each
    if job.cured("smaller", "bound"):
        most /= 2
    for _ in job.steps(200):
        _detect(network, region, round(min(most + 2, job.draw.gauss(most - 2.5 * spread, spread))))


def _detect(network: Network, region: int, regions: int) -> None:
    losses = [network.module(network.batch(region)).square().mean() for _ in range(regions)]
    train(network, torch.stack(losses).sum())
