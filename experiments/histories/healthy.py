"""Runs that do not end: nothing leaks in them, whatever their memory does."""

from __future__ import annotations

import math
from collections.abc import Iterator

from experiments.histories.job import Job, Pattern, Step


def _flat(job: Job) -> Iterator[Step]:
    for _ in range(job.steps):
        yield Step(0.0, job.usual())


def _warm_up(job: Job) -> Iterator[Step]:
    """Allocate the optimizer's state, then workspaces of libraries, fewer and fewer."""
    state, workspaces = 0.6 * job.room, 0.0
    for step in range(1, job.steps + 1):
        if job.random.random() < 1 / step:
            workspaces = min(0.02, workspaces + job.random.uniform(0.0, 0.004))
        yield Step((state if step > 1 else 0.0) + workspaces, job.usual(), is_seen=step > 40)


def _stages(job: Job) -> Iterator[Step]:
    """Unfreeze layers at three moments: gradients and state for them, and larger steps."""
    begins = ((0.08, 0.15), (0.25, 0.4), (0.6, 0.75))
    moments = [job.random.uniform(*begin) * job.steps for begin in begins]
    sizes = [job.room * job.random.uniform(0.05, 0.25) for _ in moments]
    for step in range(1, job.steps + 1):
        begun = [size for moment, size in zip(moments, sizes, strict=True) if step > moment]
        yield Step(0.8 * sum(begun), job.usual() + 0.2 * sum(begun), is_seen=bool(begun))


def _evaluations(job: Job) -> Iterator[Step]:
    every = job.steps // 10
    more = job.room * job.random.uniform(0.1, 0.5)
    for step in range(1, job.steps + 1):
        own = job.varied(more, 0.05) if step % every == 0 else 0.0
        yield Step(0.0, job.usual() + own, is_seen=step > every)


def _random_lengths(job: Job) -> Iterator[Step]:
    """Need a random amount, of which outputs are still alive at a step's end."""
    most = job.need + 0.9 * job.room
    for step in range(1, job.steps + 1):
        need = min(most, job.need * job.random.lognormvariate(-0.2, 0.4))
        yield Step(0.0, need, 0.1, is_seen=step > 20)


def _collected(job: Job) -> Iterator[Step]:
    """Collect outputs for an epoch, and clear them."""
    epoch = job.steps // job.random.randint(5, 12)
    size = job.room * job.random.uniform(0.2, 0.8)
    for step in range(1, job.steps + 1):
        kept = size * (step % epoch) / epoch
        yield Step(kept, job.usual(), is_seen=step > epoch)


def _cache(job: Job) -> Iterator[Step]:
    """Fill a cache up to its cap."""
    end = job.random.uniform(0.1, 0.3) * job.steps
    size = job.room * job.random.uniform(0.2, 0.8)
    for step in range(1, job.steps + 1):
        yield Step(size * min(1.0, step / end), job.usual(), is_seen=step > end)


def _replay_buffer(job: Job) -> Iterator[Step]:
    """Fill a buffer with episodes of random length; the fuller it is, the more are replaced."""
    size, scale = job.room * job.random.uniform(0.3, 0.8), job.steps / 20
    for step in range(1, job.steps + 1):
        kept = size * -math.expm1(-step / scale) * job.random.uniform(0.998, 1.0)
        yield Step(kept, job.usual(), is_seen=step > 3 * scale)


def _slow_wave(job: Job) -> Iterator[Step]:
    period = job.steps / 3
    size = job.room * job.random.uniform(0.2, 0.8)
    for step in range(1, job.steps + 1):
        kept = size * (1 - math.cos(2 * math.pi * step / period)) / 2
        yield Step(kept, job.usual(), is_seen=step > period)


def _garbage(job: Job) -> Iterator[Step]:
    """Leave garbage until Python's collector runs, at irregular times."""
    size, garbage, falls = job.room * job.random.uniform(0.2, 0.7), 0.0, 0
    pace, most = size / max(15, job.steps // 30), size
    for _ in range(job.steps):
        garbage += job.varied(pace, 0.5)
        if garbage > most:
            garbage, most, falls = 0.0, size * job.random.uniform(0.6, 1.0), falls + 1
        yield Step(garbage, job.usual(), is_seen=falls > 2)


def _returns(job: Job) -> Iterator[Step]:
    """Fall after an epoch, and climb slowly to the level of before, which is not passed."""
    high = job.room * job.random.uniform(0.3, 0.7)
    fall, climb = 0.3 * job.steps, 0.6 * job.steps
    for step in range(1, job.steps + 1):
        share = min(1.0, max(0.0, (step - climb) / (0.35 * job.steps))) if step > fall else 1.0
        yield Step(0.98 * high * share if step > fall else high, job.usual())


def _saves(job: Job) -> Iterator[Step]:
    """Clone the state at times, and free the clone a few steps later."""
    every = job.steps // 12
    for step in range(1, job.steps + 1):
        is_saving = step >= every and step % every < 4
        kept = min(job.model, 0.9 * job.room) if is_saving else 0.0
        yield Step(kept, job.usual(), is_seen=step > every + 4)


def _two_phases(job: Job) -> Iterator[Step]:
    """Alternate: generation, whose cache grows, and training."""
    period = job.random.randint(20, 100)
    size = job.room * job.random.uniform(0.4, 0.8)
    for step in range(1, job.steps + 1):
        place = step % period / period
        kept = size * place / 0.7 if place < 0.7 else 0.0
        need = 0.3 * job.need if kept else job.usual()
        yield Step(kept, need, is_seen=step > period)


def _logging(job: Job) -> Iterator[Step]:
    """Keep a few KiB a step, which would fill the GPU in years."""
    kept = 0.0
    for _ in range(job.steps):
        kept += job.random.choice((0, 512, 1024, 4096)) / job.total
        yield Step(kept, job.usual())


def _prefetched(job: Job) -> Iterator[Step]:
    """Read with one to four batches ahead, of random sizes."""
    batch = 0.05 * job.room
    for step in range(1, job.steps + 1):
        ahead = sum(job.varied(batch, 0.5) for _ in range(job.random.randint(1, 4)))
        yield Step(ahead, job.usual(), is_seen=step > 20)


HEALTHY = (
    Pattern("flat", _flat),
    Pattern("warm-up", _warm_up),
    Pattern("layers unfrozen in stages", _stages),
    Pattern("evaluations", _evaluations),
    Pattern("random lengths", _random_lengths),
    Pattern("outputs collected and cleared", _collected),
    Pattern("a cache filled to its cap", _cache),
    Pattern("a replay buffer", _replay_buffer),
    Pattern("a slow wave", _slow_wave),
    Pattern("a saw of garbage", _garbage),
    Pattern("a return to an earlier level", _returns),
    Pattern("saves", _saves),
    Pattern("generation and training", _two_phases),
    Pattern("a few KiB a step", _logging),
    Pattern("batches prefetched", _prefetched),
)
