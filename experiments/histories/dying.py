"""Runs that end with an OutOfMemoryError, and the true reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

from experiments.histories.job import Job, Pattern, Step


def _leaking(job: Job, begin: int) -> Iterator[Step]:
    """Keep more with every step, from `begin` on, until nothing is left at the planned end."""
    kept, pace = 0.0, job.room / (job.steps - begin)
    for step in count(1):
        kept += job.varied(pace, 0.3) if step > begin else 0.0
        yield Step(kept, job.usual(), grown=kept)


def _linear(job: Job) -> Iterator[Step]:
    return _leaking(job, 2)


def _second_half(job: Job) -> Iterator[Step]:
    return _leaking(job, job.steps // 2)


def _last_tenth(job: Job) -> Iterator[Step]:
    return _leaking(job, job.steps * 9 // 10)


def _small(job: Job) -> Iterator[Step]:
    """Keep 3 to 4% of the GPU, where nothing else is left."""
    size, kept = job.random.uniform(0.03, 0.04), 0.0
    full = job.room - size
    for _ in count(1):
        need = job.need * job.random.uniform(0.999, 1.0)
        yield Step(full + kept, need, grown=kept)
        kept += job.varied(size / job.steps, 0.3)


def _stairs(job: Job) -> Iterator[Step]:
    """Keep something at each epoch's end."""
    number = job.random.randint(8, 12)
    stair = job.room / (number - 0.5)
    for step in count(1):
        done = step * number // job.steps
        yield Step(done * stair, job.usual(), grown=done * stair if done >= 3 else 0.0)


def _every_third(job: Job) -> Iterator[Step]:
    kept = 0.0
    for step in count(1):
        kept += job.varied(3 * job.room / job.steps, 0.3) if step % 3 == 0 else 0.0
        yield Step(kept, job.usual(), grown=kept)


def _recovered(job: Job) -> Iterator[Step]:
    """Run out of memory in step 20, free much, and leak later."""
    begin, size = job.steps // 4, job.room
    pace, kept = size / (job.steps - begin), 0.0
    for step in count(1):
        if step < 20:
            yield Step(0.3 * size, job.usual())
        elif step == 20:
            yield Step(0.3 * size, 1.0, is_caught=True)
        else:
            kept += job.varied(pace, 0.3) if step > begin else 0.0
            yield Step(kept, job.usual(), grown=kept)


def _beside_random_lengths(job: Job) -> Iterator[Step]:
    kept = 0.0
    for _ in count(1):
        need = job.need * min(1.3, job.random.lognormvariate(-0.3, 0.35))
        kept += job.varied((job.room - 0.2 * job.need) / job.steps, 0.9)
        yield Step(kept, need, 0.05, grown=max(0.0, kept - 0.1 * job.need))


def _accelerating(job: Job) -> Iterator[Step]:
    power = job.random.uniform(1.5, 2.5)
    for step in count(1):
        kept = job.room * (step / job.steps) ** power
        yield Step(kept, job.usual(), grown=kept)


def _longer(job: Job) -> Iterator[Step]:
    """Need more with every step, as of sequences that get longer."""
    for step in count(1):
        grown = job.room * step / job.steps
        need = (job.need + grown) * job.random.uniform(0.97, 1.0)
        yield Step(0.0, need, grown=max(0.0, grown - 0.06 * need))


def _longer_outputs(job: Job) -> Iterator[Step]:
    """The same, where outputs of the latest batch are alive at a step's end."""
    share = job.random.uniform(0.05, 0.2)
    for step in _longer(job):
        yield step._replace(lingering=share)


def _curriculum(job: Job) -> Iterator[Step]:
    """Need more in stages."""
    number = job.random.randint(6, 9)
    for step in count(1):
        done = step * number // job.steps
        grown = job.room * done / (number - 0.5)
        yield Step(0.0, (job.need + grown) * job.random.uniform(0.98, 1.0))


def _long_batch(job: Job) -> Iterator[Step]:
    for step in count(1):
        outlier = job.room * job.random.uniform(1.02, 1.5) if step == job.steps else 0.0
        yield Step(0.0, job.usual() + outlier)


def _copy(job: Job) -> Iterator[Step]:
    """Keep a copy of the model from some step on: the next step of ordinary size fails."""
    begin = int(job.random.uniform(0.3, 0.95) * job.steps)
    size = job.room * 1.001 + 0.02 * job.need * job.random.random()
    for step in count(1):
        yield Step(size if step > begin else 0.0, job.usual())


def _copy_then_variation(job: Job) -> Iterator[Step]:
    """Keep a copy of the model; what is left is enough until a step that needs a little more."""
    begin = int(job.random.uniform(0.2, 0.7) * job.steps)
    for step in count(1):
        need = job.need * job.random.uniform(0.9, 0.98)
        more = 0.03 * job.need if step >= job.steps else 0.0
        yield Step(job.room if step > begin else 0.0, need + more)


def _outside_grows(job: Job) -> Iterator[Step]:
    outside = 0.0
    for _ in count(1):
        outside += job.varied(job.room / job.steps, 0.5)
        yield Step(0.0, job.usual(), outside=outside, grown=outside)


def _outside_jumps(job: Job) -> Iterator[Step]:
    """Another process comes, and takes more than steps leave."""
    begin = int(job.random.uniform(0.4, 0.95) * job.steps)
    size = job.room + job.need * job.random.uniform(0.1, 0.5)
    for step in count(1):
        yield Step(0.0, job.usual(), outside=size if step > begin else 0.0)


def _stranded(job: Job) -> Iterator[Step]:
    stranded = 0.0
    for _ in count(1):
        stranded += job.varied(job.room / job.steps, 0.5)
        yield Step(0.0, job.usual(), stranded=stranded)


def _tight(job: Job) -> Iterator[Step]:
    """Vary, just below the limit, until a step is a little above it."""
    limit = job.need + job.room
    for step in count(1):
        is_last = step >= job.steps
        need = limit * (1.002 if is_last else job.random.uniform(0.4, 0.998))
        yield Step(0.0, need)


def _cache_then_outlier(job: Job) -> Iterator[Step]:
    """Fill a cache up to its cap; much later, one batch is far longer."""
    end = job.random.uniform(0.15, 0.3) * job.steps
    size = job.room * job.random.uniform(0.4, 0.7)
    for step in count(1):
        outlier = job.room - size + 0.05 if step == job.steps else 0.0
        yield Step(size * min(1.0, step / end), job.usual() + outlier)


def _garbage_then_outlier(job: Job) -> Iterator[Step]:
    """Leave garbage that Python collects at times; then one batch is longer."""
    size, kept = job.room * job.random.uniform(0.4, 0.7), 0.0
    pace = size / max(10, job.steps // 25)
    for step in count(1):
        kept = 0.0 if kept >= size else kept + job.varied(pace, 0.5)
        outlier = job.room if step == job.steps else 0.0
        yield Step(min(kept, size), job.usual() + outlier)


def _leak_below_garbage(job: Job) -> Iterator[Step]:
    """Leave garbage that is collected at times, and keep a little more each time."""
    saw, garbage, kept = job.random.uniform(0.04, 0.08), 0.0, 0.0
    period = max(10, job.steps // 30)
    for step in count(1):
        garbage = 0.0 if step % period == 0 else garbage + job.varied(saw / period, 0.4)
        kept += job.varied((job.room - saw / 2) / job.steps, 0.3)
        known = kept - 2 * saw if step > 4 * period else 0.0
        yield Step(kept + garbage, job.usual(), grown=max(0.0, known))


def _exponential(job: Job) -> Iterator[Step]:
    """Keep a share more each time: something that is kept with all that is kept."""
    for step in count(1):
        kept = job.room * math.expm1(3 * step / job.steps) / math.expm1(3)
        yield Step(kept, job.usual(), grown=kept)


LEAK, KEPT = ("leak",), ("kept",)
LARGER, LARGER_STEP = ("larger_step",), ("larger_step",)

DYING = (
    Pattern("leak from the start", _linear, LEAK, KEPT, is_even=True),
    Pattern("leak of 3 to 4% of the GPU", _small, LEAK, KEPT, is_even=True),
    Pattern("leak from half of the run on", _second_half, LEAK, KEPT, is_even=True),
    Pattern("leak in the last tenth", _last_tenth, LEAK, KEPT, is_even=True),
    Pattern("leak in stairs", _stairs, LEAK, KEPT),
    Pattern("leak in every third step", _every_third, LEAK, KEPT, is_even=True),
    Pattern("leak after a caught OOM", _recovered, LEAK, KEPT),
    Pattern("leak beside random lengths", _beside_random_lengths, LEAK, KEPT),
    Pattern("leak that gets faster", _accelerating, LEAK, KEPT),
    Pattern("exponential leak", _exponential, LEAK, KEPT),
    Pattern("leak below a saw of garbage", _leak_below_garbage, LEAK, KEPT),
    Pattern("sequences get longer", _longer, LARGER, LARGER_STEP, is_even=True),
    Pattern("sequences get longer, outputs alive", _longer_outputs, LARGER, ("larger_step",)),
    Pattern("sequences get longer in stages", _curriculum, LARGER),
    Pattern("one long batch", _long_batch, LARGER),
    Pattern("a copy of the model", _copy, ("new_phase", "larger_step")),
    Pattern("a copy, then variation", _copy_then_variation, ("new_phase",)),
    Pattern("memory outside grows", _outside_grows, ("outside",), ("outside",), is_even=True),
    Pattern("another process comes", _outside_jumps, ("outside",)),
    Pattern("stranded memory grows", _stranded, ("stranded",)),
    Pattern("variation reaches the limit", _tight, ("tight",)),
    Pattern("a full cache, then a long batch", _cache_then_outlier, ("larger_step", "tight")),
    Pattern(
        "a saw of garbage, then a long batch",
        _garbage_then_outlier,
        ("larger_step", "tight", "garbage"),
    ),
)
