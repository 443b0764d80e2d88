"""Jobs that keep tensors from step to step.

`# guilty` marks the line that allocates what is kept: the stack of an allocation has no other line.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import torch
from experiments.verdict.programs.job import Job, Network, take, train
from torch import Tensor, nn


def outputs_in_a_list(job: Job) -> None:
    """Outputs of each step are kept for metrics."""
    network = job.network(job.share(0.02, 0.15))
    rows = network.rows(job.share(0.02, 0.1))
    outputs = []
    while True:
        for _ in job.steps():
            output = network.module(network.batch(rows))  # guilty
            outputs.append(output[:1].tolist() if job.cured("drop") else output)
            train(network, output.square().mean())


def total_of_losses(job: Job) -> None:
    """The sum of a loss that is only logged keeps the graph of each step."""
    network = job.network(job.share(0.05, 0.15))
    rows = network.rows(job.share(0.02, 0.06))
    total = torch.zeros((), device="cuda")
    while True:
        for _ in job.steps():
            monitored = network.module(network.batch(rows // 4)).square().mean()  # guilty
            total = total + (monitored.item() if job.cured("drop") else monitored)
            train(network, network.module(network.batch(rows)).square().mean())


def hook(job: Job) -> None:
    """A forward hook keeps the activations of a layer."""
    network = job.network(job.share(0.02, 0.12))
    rows = network.rows(job.share(0.02, 0.08))
    kept: list[Tensor] = []
    layer = network.module[job.draw.randrange(len(network.module))]
    if not job.cured("drop"):
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
            outputs.append(output[:1].tolist() if job.cured("drop") else output)
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
                losses.append(loss.item() if job.cured("drop") else loss)
            network.optimizer.step()
            network.optimizer.zero_grad(set_to_none=True)


def replay_buffer(job: Job) -> None:
    """Observations are kept on the GPU, in a buffer that is larger than the GPU."""
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.02, 0.06))
    side = max(1, job.share(0.003, 0.012) // 4 // 84 // 84)
    buffer: deque[Tensor] = deque(maxlen=20 if job.cured("drop") else 1_000_000)
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
                if job.cured("drop"):
                    del adapted[:-2]
            train(network, network.module(network.batch(rows)).square().mean())


def cached_batches(job: Job) -> None:
    """A data set keeps the tensors that it has put on the GPU."""
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.04, 0.12))
    seen: dict[int, Tensor] = {}

    def load(index: int) -> Tensor:
        if index not in seen:
            if job.cured("drop"):
                seen.clear()
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
                failures.append(str(error) if job.cured("drop") else error)
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
            values = output.detach().float()
            predictions.append({"step": step, "values": values})
            if job.cured("drop"):
                del predictions[:-1]


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
                    window = caches[layer][:, -16:] if job.cured("drop") else caches[layer]
                    caches[layer] = torch.cat([window, new], dim=1)  # guilty
                job.session.step()


def late(job: Job) -> None:
    """Outputs are kept from some step on, long after the first."""
    network = job.network(job.share(0.02, 0.1))
    rows, begin = network.rows(job.share(0.03, 0.12)), job.draw.randint(job.most // 2, 2 * job.most)
    outputs = []
    while True:
        for _ in job.steps():
            output = network.module(network.batch(rows))  # guilty
            train(network, output.square().mean())
            if job.total >= begin and not job.cured("drop"):
                outputs.append(output)


def recovered(job: Job) -> None:
    """A batch that is too long is caught and skipped; much later, outputs are kept."""
    network = job.network(job.share(0.02, 0.1))
    rows, begin = network.rows(job.share(0.03, 0.12)), 20 + job.most // 2
    outputs = []
    while True:
        for _ in job.steps():
            if job.total == 20:
                try:
                    network.module(network.batch(network.rows(2 * job.free)))
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
            output = network.module(network.batch(rows))  # guilty
            train(network, output.square().mean())
            if job.total >= begin and not job.cured("drop"):
                outputs.append(output)


def stairs(job: Job) -> None:
    """The outputs of an epoch are kept in one piece at its end."""
    network = job.network(job.share(0.02, 0.1))
    rows, epoch = network.rows(job.share(0.02, 0.08)), job.draw.randint(8, 30)
    each, epochs = job.share(0.05, 0.1) // (4 * network.width), []
    while True:
        for _ in job.steps(epoch):
            train(network, network.module(network.batch(rows)).square().mean())
        with torch.no_grad():
            outputs = torch.rand(each, network.width, device="cuda")  # guilty
        if not job.cured("drop"):
            epochs.append(outputs)
        del outputs


def small(job: Job) -> None:
    """64 KiB are kept in each step: a few percent of the GPU, and all that was left."""
    job.pause = 0.0
    network = job.network(4 << 20, layers=2)
    rows = (64 << 10) // 4 // network.width
    for _ in job.steps(3):
        train(network, network.module(network.batch(rows)).square().mean())
    steps = job.draw.randint(900, 1800)
    model = take(torch.cuda.mem_get_info()[0] - (steps << 16) - (4 << 20))
    outputs = []
    while True:
        for _ in job.steps():
            output = network.module(network.batch(rows))  # guilty
            train(network, output.square().mean())
            if not job.cured("drop"):
                outputs.append(output.detach())
    del model


class _Owner:
    """Owns a tensor and points to itself, so that only Python's collector frees it."""

    def __init__(self, size: int, *, is_cyclic: bool) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cuda")  # guilty cycles
        self.own = self if is_cyclic else None


def cycles(job: Job) -> None:
    """Each step leaves an object that points to itself, and the collector is off."""
    gc.disable()
    network = job.network(job.share(0.02, 0.1))
    rows, each = network.rows(job.share(0.03, 0.1)), job.share(0.005, 0.02)
    while True:
        for step in job.steps():
            _Owner(each, is_cyclic=not job.cured("break_cycle"))
            train(network, network.module(network.batch(rows)).square().mean())
            if job.cured("collect") and step % 4 == 0:
                gc.collect()


def compiled(job: Job) -> None:
    """Outputs of a compiled model are kept."""
    network = job.network(job.share(0.02, 0.12), layers=2)
    rows = network.rows(job.share(0.02, 0.1))
    model = torch.compile(network.module, backend="aot_eager")
    outputs = []
    while True:
        for _ in job.steps():
            output = model(network.batch(rows))  # guilty
            train(network, output.square().mean())
            if not job.cured("drop"):
                outputs.append(output)
