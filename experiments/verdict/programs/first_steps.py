"""Jobs that do not finish one step."""

from __future__ import annotations

import torch
from experiments.verdict.programs.job import SMALLER, Job, take, train


def large_batch(job: Job) -> None:
    """The batch is far too large."""
    network = job.network(job.share(0.02, 0.3))
    rows = network.rows(job.share(1.3, 4.0)) // (SMALLER if job.cured("smaller") else 1)
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
    device = "cpu" if job.cured("host") else "cuda"
    checkpoint = {
        name: torch.empty_like(value, device=device)
        for name, value in network.module.named_parameters()
    }
    rest = take(job.share(0.05, 0.1))
    for _ in job.steps(20):
        train(network, network.module(network.batch(rest.numel() // 2**20)).square().mean())
    del checkpoint


def data_on_the_gpu(job: Job) -> None:
    """A small model, and a data set that was put on the GPU as a whole."""
    network = job.network(job.share(0.006, 0.012))
    rows = network.rows(job.share(0.3, 0.45)) // (SMALLER if job.cured("smaller") else 1)
    size = job.share(0.7, 0.76) // 20
    data = [take(1 if job.cured("host") else size) for _ in range(20)]
    for _ in job.steps(20):
        train(network, network.module(network.batch(rows)).square().mean())
    del data
