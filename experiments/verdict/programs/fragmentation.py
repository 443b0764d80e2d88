"""Jobs that need no more than before, and whose free memory is in pieces."""

from __future__ import annotations

import torch
from experiments.verdict.programs.job import Job, take, train
from torch import Tensor


def window(job: Job) -> None:
    """The latest tensors of many sizes are kept."""
    network = job.network(job.share(0.02, 0.05))
    rows, least = network.rows(job.share(0.005, 0.02)), job.draw.uniform(0.002, 0.01)
    most, full = job.draw.uniform(0.05, 0.09), job.share(0.66, 0.74)
    kept: list[Tensor] = []
    for _ in job.steps(4 * job.most):
        size = job.share(least, most)
        while kept and sum(map(len, kept)) + size > full:
            del kept[0]
        kept.append(take(size))
        train(network, network.module(network.batch(rows)).square().mean())


def evicted_at_random(job: Job) -> None:
    """A cache of features of many sizes drops entries at random."""
    network = job.network(job.share(0.02, 0.05))
    rows, full = network.rows(job.share(0.005, 0.02)), job.share(0.72, 0.8)
    kept: list[Tensor] = []

    def put() -> None:
        size = int(job.free * min(0.15, job.draw.lognormvariate(-4.2, 0.9)))
        while kept and sum(map(len, kept)) + size > full:
            kept.pop(job.draw.randrange(len(kept)))
        kept.append(take(size))

    while sum(map(len, kept)) < 0.8 * full:
        put()
    for _ in job.steps(4 * job.most):
        put()
        train(network, network.module(network.batch(rows)).square().mean())


def phases(job: Job) -> None:
    """Tensors that stay lie between tensors that go; then one tensor is large."""
    network = job.network(job.share(0.01, 0.03))
    rows = network.rows(job.share(0.002, 0.006))
    buffers = [take(job.share(0.2, 0.27)) for _ in range(3)]
    del buffers
    kept: list[Tensor] = []
    going: list[Tensor] = []
    while sum(map(len, going)) < 0.5 * job.free:
        kept.append(take(job.share(0.003, 0.01)))
        going.append(take(job.share(0.015, 0.035)))
        train(network, network.module(network.batch(rows)).square().mean())
    del going
    for _ in job.steps():
        large = take(job.share(0.38, 0.45))
        del large
        train(network, network.module(network.batch(rows)).square().mean())


def shuffled_buffers(job: Job) -> None:
    """Buffers are replaced by others of a new size, as many bytes in all."""
    network = job.network(job.share(0.02, 0.05))
    rows = network.rows(job.share(0.005, 0.02))
    number, full = job.draw.randint(10, 20), job.share(0.68, 0.75)
    buffers = _parts(job, number, full)
    for _ in job.steps(4 * job.most):
        first, second = job.draw.sample(range(number), 2)
        both = buffers[first].numel() + buffers[second].numel()
        share = job.draw.uniform(0.2, 0.8)
        buffers[first] = buffers[second] = torch.empty(0)
        buffers[first], buffers[second] = take(share * both), take((1 - share) * both)
        train(network, network.module(network.batch(rows)).square().mean())


def _parts(job: Job, number: int, full: int) -> list[Tensor]:
    weights = [job.draw.uniform(0.3, 1.7) for _ in range(number)]
    return [take(full * weight / sum(weights)) for weight in weights]
