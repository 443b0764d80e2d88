"""Jobs that keep tensors from step to step.

`# guilty` marks the line that allocates what is kept: the stack of an allocation has no other line.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from experiments.verdict.programs.job import Job, Network, train
from torch import Tensor, nn


def outputs_in_a_list(job: Job) -> None:
    """Outputs of each step are kept for metrics."""
    network = job.network(job.share(0.02, 0.15))
    rows = network.rows(job.share(0.02, 0.1))
    outputs = []
    while True:
        for _ in job.steps():
            output = network.module(network.batch(rows))  # guilty
            outputs.append(output)
            train(network, output.square().mean())


def total_of_losses(job: Job) -> None:
    """The sum of a loss that is only logged keeps the graph of each step."""
    network = job.network(job.share(0.05, 0.15))
    rows = network.rows(job.share(0.02, 0.06))
    total = torch.zeros((), device="cuda")
    while True:
        for _ in job.steps():
            monitored = network.module(network.batch(rows // 4)).square().mean()  # guilty
            total = total + monitored
            train(network, network.module(network.batch(rows)).square().mean())


def hook(job: Job) -> None:
    """A forward hook keeps the activations of a layer."""
    network = job.network(job.share(0.02, 0.12))
    rows = network.rows(job.share(0.02, 0.08))
    kept: list[Tensor] = []
    layer = network.module[job.draw.randrange(len(network.module))]
    layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach()))
    while True:
        for _ in job.steps():
            output = network.module(network.batch(rows))  # guilty
            train(network, output.square().mean())


def many_lengths(job: Job) -> None:
    """Outputs are kept, of batches of many lengths."""
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.03, 0.1))
    outputs = []
    while True:
        for _ in job.steps():
            length = job.draw.uniform(0.2, 1.8)
            output = network.module(network.batch(int(rows * length) + 1))  # guilty
            outputs.append(output)
            train(network, output.square().mean())


def retained_graphs(job: Job) -> None:
    """Gradients are accumulated over micro-batches whose graphs are retained and kept."""
    network = job.network(job.share(0.05, 0.15))
    rows = network.rows(job.share(0.003, 0.012))
    losses = []
    while True:
        for _ in job.steps():
            for _ in range(job.draw.choice((2, 4))):
                loss = network.module(network.batch(rows)).square().mean()  # guilty
                loss.backward(retain_graph=True)
                losses.append(loss)
            network.optimizer.step()
            network.optimizer.zero_grad(set_to_none=True)


def replay_buffer(job: Job) -> None:
    """Observations are kept on the GPU, in a buffer that is larger than the GPU."""
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.02, 0.06))
    side = max(1, job.share(0.003, 0.012) // 4 // 84 // 84)
    buffer: deque[Tensor] = deque(maxlen=1_000_000)
    while True:
        for _ in job.steps():
            observations = torch.rand(side, 84, 84, device="cuda")  # guilty
            buffer.append(observations)
            train(network, network.module(network.batch(rows)).square().mean())


def adapters(job: Job) -> None:
    """A new adapter is made for each task, and none is dropped."""
    network = job.network(job.share(0.04, 0.12))
    rows, rank = network.rows(job.share(0.02, 0.06)), job.draw.choice((8, 16, 32))
    size = max(network.width, job.share(0.002, 0.008) // (8 * rank))
    adapted = []
    while True:
        for step in job.steps():
            if step % 2 == 0:
                down = nn.Linear(size, rank, device="cuda")  # guilty
                up = nn.Linear(rank, size, device="cuda")  # guilty
                adapted.append(nn.Sequential(down, up))
            train(network, network.module(network.batch(rows)).square().mean())


def cached_batches(job: Job) -> None:
    """A data set keeps the tensors that it has put on the GPU."""
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.04, 0.12))
    seen: dict[int, Tensor] = {}

    def load(index: int) -> Tensor:
        if index not in seen:
            seen[index] = torch.rand(rows, network.width, device="cuda")  # guilty
        return seen[index]

    index = 0
    while True:
        for _ in job.steps():
            index += 1
            train(network, network.module(load(index)).square().mean())


def kept_exceptions(job: Job) -> None:
    """Steps that fail are listed with their exceptions, whose tracebacks keep their frames."""
    network = job.network(job.share(0.03, 0.1))
    rows, every = network.rows(job.share(0.02, 0.06)), job.draw.choice((1, 2, 3))
    failures = []
    while True:
        for step in job.steps():
            try:
                _step(network, rows, is_broken=step % every == 0)
            except ValueError as error:  # noqa: PERF203
                failures.append(error)
                train(network, network.module(network.batch(rows)).square().mean())


def _step(network: Network, rows: int, *, is_broken: bool) -> None:
    output = network.module(network.batch(rows // 2))  # guilty kept_exceptions
    if is_broken:
        raise ValueError("a label is missing")
    train(network, output.square().mean())


def metrics_per_batch(job: Job) -> None:
    """Detached predictions wait for a metric at the end of an epoch that is too long."""
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.03, 0.1))
    predictions: list[dict[str, Any]] = []
    while True:
        for step in job.steps():
            output = network.module(network.batch(rows))  # guilty
            train(network, output.square().mean())
            predictions.append({"step": step, "values": output.detach().float()})


def generation_cache(job: Job) -> None:
    """A decoder without an optimizer keeps keys and values of every token."""
    layers, width = job.draw.randint(2, 6), 64 * job.draw.randint(8, 32)
    batch = max(1, job.share(0.003, 0.01) // (layers * width * 2))
    caches = [torch.empty(batch, 0, width, dtype=torch.half, device="cuda") for _ in range(layers)]
    with torch.no_grad():
        while True:
            for _ in job.steps():
                for layer in range(layers):
                    new = torch.rand(batch, 1, width, dtype=torch.half, device="cuda")
                    caches[layer] = torch.cat([caches[layer], new], dim=1)  # guilty
                job.session.step()
