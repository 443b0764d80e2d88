"""Jobs whose memory is limited, or taken by others."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from experiments.verdict.programs.job import SMALLER, Job, Network, fraction, take, train
from torch import Tensor, distributed

NEIGHBOR = """
import ctypes, sys
cuda, pointer = ctypes.CDLL(None), ctypes.c_void_p()
for line in sys.stdin:
    cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(int(line)))
    print(flush=True)
"""
"""Another process, which allocates what it reads."""
RANK_1 = """
import sys, torch
from torch import distributed
kept, value = [], torch.zeros(1)
for line in sys.stdin:
    kept.append(torch.empty(int(line), dtype=torch.uint8, device="cuda"))
    print(flush=True)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
    distributed.all_reduce(value)
"""
"""Rank 1 of a job, which uses the GPU of rank 0."""

PHANTOM_HOLDS = getattr(ctypes.CDLL(None), "phantom_hold_events", None)
LATE_CYCLES = 2_000_000_000


def _limit(low: float, high: float, job: Job) -> None:
    own = job.draw.uniform(low, high)
    torch.cuda.set_per_process_memory_fraction(fraction() or own)


def fraction_in_first_step(job: Job) -> None:
    """A memory fraction is less than the first step needs."""
    _limit(0.2, 0.35, job)
    network = job.network(job.share(0.05, 0.15))
    rows = network.rows(job.share(0.4, 0.5)) // (SMALLER if job.cured("smaller") else 1)
    for _ in job.steps(40):
        train(network, network.module(network.batch(rows)).square().mean())


def fraction_with_leak(job: Job) -> None:
    """A memory fraction ends a leak early."""
    _limit(0.35, 0.6, job)
    network = job.network(job.share(0.02, 0.08))
    rows = network.rows(job.share(0.03, 0.08))
    outputs = []
    while True:
        for _ in job.steps():
            output = network.module(network.batch(rows))  # guilty
            outputs.append(output[:1].tolist() if job.cured("drop") else output)
            train(network, output.square().mean())


def fraction_with_longer_batch(job: Job) -> None:
    """A batch that is longer than the others does not fit into the memory fraction."""
    _limit(0.4, 0.5, job)
    network = job.network(job.share(0.02, 0.08))
    rows = network.rows(job.share(0.1, 0.15))
    for step in job.steps(job.most):
        length = 1.0 if step < job.most // 2 or job.cured("bound") else 4.0
        train(network, network.module(network.batch(int(rows * length))).square().mean())


class Neighbor:
    """Another process on the GPU."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def take(self, size: float) -> None:
        """Let it allocate some bytes."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"%d\n" % size)
        self._process.stdin.flush()
        self._process.stdout.readline()


@contextmanager
def _neighbor(*command: str) -> Iterator[Neighbor]:
    command = command or ("-c", NEIGHBOR)
    with subprocess.Popen([sys.executable, *command], stdin=-1, stdout=-1) as process:
        neighbor = Neighbor(process)
        neighbor.take(1)  # its CUDA context
        yield neighbor


def _step(network: Network, rows: int, job: Job) -> None:
    length = job.draw.uniform(0.8, 1.0)
    train(network, network.module(network.batch(int(rows * length))).square().mean())
    torch.cuda.empty_cache()


def neighbor_before(job: Job) -> None:
    """Another process holds most of the GPU."""
    with _neighbor() as neighbor:
        size = job.share(0.55, 0.7)
        neighbor.take(1 if job.cured("outside") else size)
        network = job.network(job.share(0.05, 0.15))
        rows = network.rows(job.share(0.4, 0.6))
        for _ in job.steps(30):
            _step(network, rows, job)


def neighbor_comes(job: Job) -> None:
    """Another process takes most of the GPU after some steps."""
    network = job.network(job.share(0.05, 0.15))
    rows = network.rows(job.share(0.2, 0.4))
    for _ in job.steps(job.most // 2):
        _step(network, rows, job)
    with _neighbor() as neighbor:
        size = torch.cuda.mem_get_info()[0] - job.share(0.03, 0.06)
        neighbor.take(1 if job.cured("outside") else size)
        for _ in job.steps(30):
            _step(network, rows, job)


def neighbor_grows(job: Job) -> None:
    """Another process takes more and more of the GPU."""
    network = job.network(job.share(0.05, 0.15))
    rows, each = network.rows(job.share(0.2, 0.4)), job.free / job.most
    with _neighbor() as neighbor:
        while True:
            for _ in job.steps():
                if not job.cured("outside"):
                    neighbor.take(min(each, torch.cuda.mem_get_info()[0]))
                _step(network, rows, job)


def communicators(job: Job) -> None:
    """The process itself takes memory outside the allocator, as new communicators do."""
    network = job.network(job.share(0.05, 0.15))
    rows, each = network.rows(job.share(0.2, 0.4)), job.share(0.01, 0.03)
    cuda, pointer = ctypes.CDLL(None), ctypes.c_void_p()
    while True:
        for step in job.steps():
            if step % 3 == 2 and not job.cured("outside"):
                cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(each))
            _step(network, rows, job)


def second_rank(job: Job) -> None:
    """Both ranks of a job use one GPU, and the other keeps more and more."""
    network = job.network(job.share(0.05, 0.15))
    rows, each = network.rows(job.share(0.1, 0.2)), job.free // job.most
    store, value = f"file://{os.environ['PHANTOM_STATE_DIR']}/store", torch.zeros(1)
    with _neighbor("-W", "ignore", "-c", RANK_1, store) as neighbor:
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=2)
        distributed.all_reduce(value)
        while True:
            for _ in job.steps():
                neighbor.take(1 if job.cured("outside") else each)
                distributed.all_reduce(value)
                _step(network, rows, job)


def private_pools(job: Job) -> None:
    """A pool is made for each length of batches, and keeps what was allocated in it."""
    network = job.network(job.share(0.02, 0.1))
    rows, each = network.rows(job.share(0.02, 0.06)), job.share(0.05, 0.09)
    every, pools = job.draw.randint(4, 12), list[torch.cuda.MemPool]()
    while True:
        for step in job.steps():
            if step % every == 0:
                if not (pools and job.cured("share_pool")):
                    pools.append(torch.cuda.MemPool(use_on_oom=job.cured("use_on_oom")))
                with torch.cuda.use_mem_pool(pools[-1]):
                    take(each)
            train(network, network.module(network.batch(rows)).square().mean())


def waiting_frees(job: Job) -> None:
    """A large buffer is used on a side stream, which is late once, and shares its segment."""
    size = job.share(0.5, 0.6)
    take(size + (4 << 20))
    pin, buffers = take(2 << 20), [take(size)]
    network = job.network(job.share(0.02, 0.1))
    rows = network.rows(job.share(0.02, 0.06))
    stream = torch.cuda.Stream()
    for step in job.steps(job.most + 20):
        train(network, network.module(network.batch(rows)).square().mean())
        _hold(stream, is_held=step == job.most)
        buffers.pop().record_stream(stream)
        if job.cured("wait"):
            _wait(stream)
        buffers.append(_taken(job, size, stream))
    del pin


def _hold(stream: torch.cuda.Stream, *, is_held: bool) -> None:
    """Let a stream be late, on the phantom until `_wait`, on a real GPU for about a second."""
    if PHANTOM_HOLDS is not None:
        PHANTOM_HOLDS(is_held)
    elif is_held:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)  # noqa: SLF001


def _wait(stream: torch.cuda.Stream) -> None:
    if PHANTOM_HOLDS is not None:
        PHANTOM_HOLDS(0)
    stream.synchronize()


def _taken(job: Job, size: int, stream: torch.cuda.Stream) -> Tensor:
    try:
        return take(size)
    except torch.OutOfMemoryError:
        if not job.cured("repeat"):
            raise
        _wait(stream)
        return take(size)
