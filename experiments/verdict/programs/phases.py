"""Jobs that do something new after a while: an evaluation, a copy, a save."""

from __future__ import annotations

import copy

import torch
from experiments.verdict.programs.job import SMALLER, Job, Network, train
from torch import Tensor


def _train_for_a_while(job: Job, network: Network, rows: int) -> None:
    for _ in job.steps(job.most // 2 + 10):
        length = job.draw.uniform(0.95, 1.0)
        train(network, network.module(network.batch(int(rows * length))).square().mean())
    job.progress = 0


def graphs_of_batches_not_trained_on(job: Job) -> None:
    """The first evaluation, in the same function, keeps all outputs with their graphs."""
    network = job.network(job.share(0.02, 0.2))
    rows = network.rows(job.share(0.04, 0.15))
    _train_for_a_while(job, network, rows)
    network.module.eval()
    outputs = []
    with torch.set_grad_enabled(not job.cured("no_grad")):
        for _ in job.steps(100):
            output = network.module(network.batch(rows))  # guilty
            outputs.append(output[:1].tolist() if job.cured("no_grad", "drop") else output)


def without_no_grad(job: Job) -> None:
    """The first evaluation uses the larger batches that torch.no_grad() would allow, without it."""
    network = job.network(job.share(0.02, 0.2))
    rows = network.rows(job.share(0.1, 0.25))
    _train_for_a_while(job, network, rows)
    _validate(job, network, rows * 10)


def _validate(job: Job, network: Network, rows: int) -> None:
    network.module.eval()
    if job.cured("bound", "smaller"):
        rows //= SMALLER
    with torch.set_grad_enabled(not job.cured("no_grad")):
        for _ in job.steps(5):
            network.module(network.batch(rows)).square().mean().item()


def under_no_grad(job: Job) -> None:
    """The first evaluation uses batches that are too large, though no graphs are recorded."""
    network = job.network(job.share(0.02, 0.2))
    rows = network.rows(job.share(0.1, 0.25))
    _train_for_a_while(job, network, rows)
    _evaluate(job, network, int(1.3 * job.free) // (4 * network.width))


def _evaluate(job: Job, network: Network, rows: int) -> None:
    network.module.eval()
    if job.cured("bound", "smaller"):
        rows //= SMALLER
    with torch.no_grad():
        for _ in job.steps(5):
            network.module(network.batch(rows)).square().mean().item()


def phase_with_a_name(job: Job) -> None:
    """The first evaluation, which the program names, keeps logits of every batch."""
    network = job.network(job.share(0.05, 0.25))
    rows = network.rows(job.share(0.1, 0.3))
    _train_for_a_while(job, network, rows)
    logits = []
    with job.session.phase("evaluation"), torch.no_grad():
        for _ in job.steps(400):
            output = network.module(network.batch(rows // 2))  # guilty
            is_kept = not job.cured("no_grad", "smaller", "drop")  # they all say: not on the GPU
            logits.append(output if is_kept else output[:1].tolist())


def moving_average(job: Job) -> None:
    """A copy of the model for a moving average is made after some steps."""
    network = job.network(job.share(0.5, 0.64), "SGD")
    rows = network.rows(job.share(0.2, 0.3))
    if job.cured("smaller", "bound"):
        rows //= SMALLER
    _train_for_a_while(job, network, rows)
    average = None if job.cured("host") else copy.deepcopy(network.module)
    _train_for_a_while(job, network, rows)
    del average


def cloned_state(job: Job) -> None:
    """The first save clones parameters and optimizer state on the GPU."""
    network = job.network(job.share(0.72, 0.85))
    rows = network.rows(job.share(0.02, 0.08))
    _train_for_a_while(job, network, rows)
    saved = None if job.cured("host") else _save(network)
    _train_for_a_while(job, network, rows)
    del saved


def _save(network: Network) -> list[dict[str, Tensor]]:
    return [
        {name: tensor.clone() for name, tensor in network.module.state_dict().items()},
        *({name: value.clone() for name, value in entry.items()} for entry in _state(network)),
    ]


def _state(network: Network) -> list[dict[str, Tensor]]:
    return list(network.optimizer.state.values())
