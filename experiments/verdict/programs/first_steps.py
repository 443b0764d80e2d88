"""Jobs that do not finish one step."""

from __future__ import annotations

import torch
from experiments.verdict.programs.job import Job, take, train


def large_batch(job: Job) -> None:
    """The batch is far too large."""
    network = job.network(job.share(0.02, 0.3))
    rows = network.rows(job.share(1.3, 4.0))
    for _ in job.steps(20):
        train(network, network.module(network.batch(rows)).square().mean())


def optimizer_state(job: Job) -> None:
    """Parameters and gradients fit, but not the state that the first optimizer step creates."""
    network = job.network(job.share(1.15, 1.6), layers=job.draw.randint(6, 16))
    rows = network.rows(job.share(0.02, 0.06))
    for _ in job.steps(20):
        train(network, network.module(network.batch(rows)).square().mean())


def large_model(job: Job) -> None:
    """The model does not fit."""
    network = job.network(job.share(2.4, 4.0), "SGD", layers=job.draw.randint(12, 40))
    for _ in job.steps(20):
        train(network, network.module(network.batch(8)).square().mean())


def loaded_twice(job: Job) -> None:
    """A checkpoint is loaded onto the GPU beside the model, and stays."""
    network = job.network(job.share(0.9, 1.1), "SGD")
    checkpoint = {
        name: torch.empty_like(value) for name, value in network.module.named_parameters()
    }
    rest = take(job.share(0.05, 0.1))
    for _ in job.steps(20):
        train(network, network.module(network.batch(rest.numel() // 2**20)).square().mean())
    del checkpoint
