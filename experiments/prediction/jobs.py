"""Simulated jobs whose ends are known: training loops that grow, stay flat, level off, or fail.

A job is one rank on one GPU. Its kind says what uses the memory, and its course says when: a share
of what is left of the GPU beside the job at its start, over virtual time. Kind and seed determine
a job. Before most jobs, a job of the same name ran: with the same parameters, or with others.
This module does not know what is published about a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from torchmem.allocator.sizes import GIB, MIB
from torchmem.sdk.reading.plan import Plan
from torchmem.simulator.blocks import Block
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

Group = Literal["growing", "sudden", "flat", "stops"]
"""How memory develops.

`growing` until it is exhausted; `sudden`: exhausted without notice; `flat`: as much all the time;
`stops`: growth that levels off in time, or recedes.
"""
Course = Callable[[float], float]
"""Which share of the room is used after how many seconds."""

EVENTS_PER_STEP = 5
HOUR = 3600.0
LONGEST_SECONDS = 6 * HOUR
"""A growing job that still runs after this time does not count in the yardstick."""
SHORTEST_GROWTH, LONGEST_GROWTH = 600.0, 3.5 * HOUR
"""Seconds in which the room is used up."""
STATISTICS_BYTES = 4 * MIB
COUNTING_ERROR = 0.02
PACE_ERROR, LEVEL_ERROR = 0.1, 0.03
"""How much two runs with the same parameters differ: how long growth takes, and where it ends."""
SHORTEST_PAUSE, LONGEST_PAUSE = 60.0, 2 * HOUR
"""Seconds between the end of a job and the next one of the same name."""


@dataclass(slots=True)
class Script:
    """What the script of a job tells the SDK: its largest batch, and the size of each batch.

    Sizes are multiples of the longest batch at the start. A script counts its tokens, and
    each takes about, but not exactly, a fixed number of bytes of activations.
    """

    largest: float | None
    rng: Random
    size: float = 0.0

    def tell(self, plan: Plan) -> None:
        """Tell the size of the batch of the step that ends."""
        counted = self.size * self.rng.uniform(1 - COUNTING_ERROR, 1 + COUNTING_ERROR)
        if counted:
            plan.batch(counted)


@dataclass(frozen=True, slots=True)
class Job:
    """One job: its scenario, how long a step takes and how long it is watched, in seconds.

    `is_earlier` is that of `job`.
    """

    kind: str
    group: Group
    seed: int
    scenario: Scenario
    step_seconds: float
    seconds: float
    expandable_segments: bool
    script: Script
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model needs: shares of the GPU, the number of its layers, and its shortest batch.

    `base`: weights, gradients and optimizer state; `activations`: activations of the longest batch.
    """

    base: float
    activations: float
    layers: int
    shortest: float

    @property
    def room(self) -> float:
        """The share of the GPU that is left at the peak."""
        return 1 - self.base - self.activations


class Trainer:
    """A model on the GPU, and its training steps.

    `parameters` draws what is the same in each run with the same parameters, `rng` the rest.
    """

    def __init__(
        self, worker: SimulatedRank, shape: Shape, script: Script, parameters: Random, rng: Random
    ) -> None:
        self.worker, self.allocator, self.shape = worker, worker.allocator, shape
        self.script, self.parameters, self.rng = script, parameters, rng
        self.room_bytes = int(worker.capacity * shape.room)
        self._activation_bytes = worker.capacity * shape.activations

    def load(self, events: int) -> Iterator[ScenarioEvent]:
        """Load the weights, in as many parts as events, and make room for the optimizer's state."""
        size = int(self.worker.capacity * self.shape.base / (4 * self.shape.layers))
        for part in range(4 * self.shape.layers):
            self.allocator.malloc(size)
            if part % max(1, 4 * self.shape.layers // events) == 0:
                yield "compute"

    def step(
        self, sequence: float = 1.0, middle: Callable[[], object] = lambda: None
    ) -> Iterator[ScenarioEvent]:
        """Run one step on a batch of random length, the longest of which is `sequence`.

        `middle` is called after each layer of the forward pass.
        """
        length = self.script.size = sequence * self.rng.uniform(self.shape.shortest, 1)
        yield from self.forward_backward(length, middle)
        yield "step"

    def forward_backward(
        self, length: float, middle: Callable[[], object] = lambda: None
    ) -> Iterator[ScenarioEvent]:
        """Run a forward and a backward pass; an OutOfMemoryError frees what they hold."""
        live: list[Block] = []
        layer = self._activation_bytes * length * 0.9 / self.shape.layers
        try:
            for number in range(self.shape.layers):
                live += [self.allocator.malloc(int(layer * part)) for part in (0.1, 0.2, 0.3, 0.4)]
                middle()
                if number == self.shape.layers // 2:
                    yield "compute"
            live.append(self.allocator.malloc(int(self._activation_bytes * length * 0.1)))
            yield "compute"
            self.allocator.free(live.pop())
            for number in range(self.shape.layers):
                gradient = self.allocator.malloc(int(layer * 0.2))
                for _ in range(4):
                    self.allocator.free(live.pop())
                self.allocator.free(gradient)
                if number in (self.shape.layers // 3, 2 * self.shape.layers // 3):
                    yield "compute"
        finally:
            self.worker.free_many(reversed(live))


# --- Courses


def _log_uniform(rng: Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def course(rng: Random, *, stops: bool) -> Course:
    """Return a course that reaches 1, or with `stops` one of the same shapes that levels off."""
    duration = _log_uniform(rng, SHORTEST_GROWTH, LONGEST_GROWTH)
    start = rng.uniform(0, 0.3 * HOUR)
    most = rng.uniform(0.3, 0.96) if stops else math.inf
    shape = rng.choice((_line, _line, _accelerating, _slowing, _stairs, _pauses))
    grown = shape(rng, duration, most)
    return lambda seconds: min(most, grown(max(0.0, seconds - start)))


def _line(_: Random, duration: float, __: float) -> Course:
    return lambda seconds: seconds / duration


def _accelerating(_: Random, duration: float, __: float) -> Course:
    return lambda seconds: (seconds / duration) ** 1.7


def _slowing(rng: Random, duration: float, most: float) -> Course:
    """Approach a limit: below 1 if the course stops, otherwise above it."""
    limit = most if most < 1 else rng.uniform(1.1, 1.6)
    return lambda seconds: limit * (1 - math.exp(-1.5 * seconds / duration))


def _stairs(rng: Random, duration: float, _: float) -> Course:
    pause = duration / rng.randint(5, 25)
    return lambda seconds: pause * (seconds // pause) / duration


def _pauses(rng: Random, duration: float, _: float) -> Course:
    """Grow in the first part of each period."""
    period, share = rng.uniform(0.1, 0.3) * duration, rng.uniform(0.4, 0.8)

    def grown(seconds: float) -> float:
        whole, part = divmod(seconds, period)
        return (whole + min(1.0, part / period / share)) * period / duration

    return grown


def _waves(rng: Random) -> Course:
    """Rise and fall between nothing and a part of the room, as the load of a day does."""
    period, most = _log_uniform(rng, 0.3 * HOUR, 4 * HOUR), rng.uniform(0.3, 0.95)
    phase = rng.uniform(0, 2 * math.pi)
    return lambda seconds: most * (1 + math.sin(2 * math.pi * seconds / period + phase)) / 2


# --- What uses the memory

Train = Callable[[Trainer, Course, Callable[[], float]], Iterator[ScenarioEvent]]
"""A training loop: the model, the course, and the virtual seconds since training began."""


def leak(trainer: Trainer, grown: Course, clock: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Keep some tensors of each step."""
    size = int(_log_uniform(trainer.parameters, 1 * MIB, 64 * MIB))
    kept = 0
    while True:
        yield from trainer.step()
        while (kept + 1) * size <= grown(clock()) * trainer.room_bytes:
            trainer.allocator.malloc(size)
            kept += 1


def cache(trainer: Trainer, grown: Course, clock: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Append to one tensor per layer, as a cache of keys and values does: copy, then free."""
    layers: list[Block | None] = [None] * trainer.shape.layers
    while True:
        size = int(grown(clock()) * trainer.room_bytes / len(layers))
        for index, old in enumerate(layers):
            if size > MIB and (old is None or size > 1.02 * old.requested_size):
                layers[index] = trainer.allocator.malloc(size)
                if old is not None:
                    trainer.allocator.free(old)
        yield from trainer.step()


def curriculum(
    trainer: Trainer, grown: Course, clock: Callable[[], float]
) -> Iterator[ScenarioEvent]:
    """Train on longer and longer sequences."""
    longest = trainer.shape.room / trainer.shape.activations
    while True:
        yield from trainer.step(1 + longest * grown(clock()))


def fragmentation(
    trainer: Trainer, grown: Course, clock: Callable[[], float]
) -> Iterator[ScenarioEvent]:
    """Keep small tensors between activations of growing size; each pins its segment."""
    kept: list[Block] = []
    most = int(trainer.room_bytes / (40 * MIB))

    def keep() -> None:
        tensor = trainer.allocator.malloc(STATISTICS_BYTES)
        if len(kept) < grown(clock()) * most:
            kept.append(tensor)
        elif kept and trainer.rng.random() < 0.02:
            place = trainer.rng.randrange(len(kept))
            trainer.allocator.free(kept[place])
            kept[place] = tensor
        else:
            trainer.allocator.free(tensor)

    while True:
        yield from trainer.step(1 + 0.5 * grown(clock()), keep)


def neighbor(
    trainer: Trainer, grown: Course, clock: Callable[[], float]
) -> Iterator[ScenarioEvent]:
    """Share the GPU with a process that grows; the cache is emptied at each evaluation."""
    gpu = trainer.allocator.gpu
    other = gpu.use.others()[0]
    pause = trainer.parameters.uniform(120, 900)
    evaluation = 0
    while True:
        if clock() // pause > evaluation:
            evaluation = int(clock() // pause)
            trainer.allocator.empty_cache()
        wanted = int(grown(clock()) * trainer.room_bytes) - other.own()
        if wanted > 0:
            other.claim(min(wanted, gpu.mem_get_info()[0]), gpu.total_bytes)
        elif wanted < 0:
            other.release(-wanted)
        yield from trainer.step()


def phases(trainer: Trainer, grown: Course, clock: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Generate with a cache of keys and values, then train, in turns; responses get longer."""
    chosen = trainer.parameters
    emptied, length = chosen.random() < 0.5, chosen.randint(3, 12)
    start = chosen.uniform(0.3, 0.9) * trainer.shape.activations
    while True:
        share = start + (trainer.shape.room + trainer.shape.activations - start) * grown(clock())
        size = int(share * trainer.worker.capacity / trainer.shape.layers)
        held: list[Block] = []
        for number in range(trainer.shape.layers):
            held.append(trainer.allocator.malloc(size))
            if number % 3 == 0:
                yield "compute"
        trainer.worker.free_many(held)
        if emptied:
            trainer.allocator.empty_cache()
        for _ in range(length):
            yield from trainer.step()


def stable(trainer: Trainer, _: Course, __: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Train on batches of one length, or of lengths up to a fixed one."""
    while True:
        yield from trainer.step()


def evaluation(
    trainer: Trainer, _: Course, clock: Callable[[], float], most: float = 0.9
) -> Iterator[ScenarioEvent]:
    """Evaluate now and then on batches that use up to `most` of the room more; empty the cache."""
    chosen = trainer.parameters
    pause, emptied = chosen.uniform(300, 2400), chosen.random() < 0.5
    more = chosen.uniform(-0.5, most) if most < 1 else most
    length = 1 + more * trainer.shape.room / trainer.shape.activations
    number = 0
    while True:
        yield from trainer.step()
        if clock() // pause > number:
            number = int(clock() // pause)
            for _batch in range(trainer.rng.randint(3, 20)):
                yield from trainer.forward_backward(length * trainer.rng.uniform(0.7, 1))
            if emptied:
                trainer.allocator.empty_cache()


def search(trainer: Trainer, _: Course, __: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Double the batch until it does not fit, and train with the last that did."""
    length = 0.25
    while True:
        try:
            for _batch in range(trainer.rng.randint(2, 5)):
                yield from trainer.forward_backward(length)
                yield "step"
        except OutOfMemoryError:
            break
        length *= 1.5
    trainer.allocator.empty_cache()
    while True:
        yield from trainer.step(length / 1.5)


def spike(trainer: Trainer, _: Course, clock: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Get one batch that is far longer than all others."""
    at = trainer.rng.uniform(600, 2 * HOUR)
    while True:
        longest = 1.5 * (1 + trainer.shape.room / trainer.shape.activations)
        yield from trainer.step(longest if clock() > at else 1)


def tail(trainer: Trainer, _: Course, __: Callable[[], float]) -> Iterator[ScenarioEvent]:
    """Draw lengths from a distribution without an upper limit."""
    limit = math.log(1 + trainer.shape.room / trainer.shape.activations)
    while True:
        yield from trainer.step(math.exp(trainer.rng.gauss(0, limit / 3.2)))


def first_evaluation(
    trainer: Trainer, grown: Course, clock: Callable[[], float]
) -> Iterator[ScenarioEvent]:
    """Evaluate on batches that do not fit."""
    return evaluation(trainer, grown, clock, most=1.8)


def sudden_neighbor(
    trainer: Trainer, _: Course, clock: Callable[[], float]
) -> Iterator[ScenarioEvent]:
    """Lose the rest of the GPU to another process within half a minute, and the cache after it."""
    at = trainer.rng.uniform(600, 2 * HOUR)
    return neighbor(trainer, lambda seconds: min(1.0, max(0.0, (seconds - at) / 30)), clock)


# --- Kinds

GROWTH: dict[str, Train] = {
    "leak": leak,
    "cache": cache,
    "curriculum": curriculum,
    "fragmentation": fragmentation,
    "neighbor": neighbor,
    "phases": phases,
}
"""What grows, in jobs that run out of memory and in others whose growth levels off in time."""
SUDDEN: dict[str, Train] = {
    "spike": spike,
    "tail": tail,
    "first evaluation": first_evaluation,
    "sudden neighbor": sudden_neighbor,
}
FLAT: dict[str, Train] = {
    "stable": stable,
    "variable lengths": stable,
    "tight": stable,
    "evaluation": evaluation,
    "search": search,
    "steady phases": phases,
    "steady cache": cache,
    "steady neighbor": neighbor,
}
WAVES: dict[str, Train] = {"waves": curriculum, "waves of a neighbor": neighbor}
KINDS: dict[str, tuple[Group, Train]] = {
    **{f"{name} grows": ("growing", train) for name, train in GROWTH.items()},
    **{name: ("sudden", train) for name, train in SUDDEN.items()},
    **{name: ("flat", train) for name, train in FLAT.items()},
    **{f"{name} stops": ("stops", train) for name, train in GROWTH.items()},
    **{name: ("stops", train) for name, train in WAVES.items()},
}


DIES_OF_A_BATCH = ("curriculum grows", "curriculum stops", "spike", "tail")
"""Kinds that run out of memory, if they do, with a batch that their script knew of before."""


def _shape(kind: str, rng: Random) -> Shape:
    base, activations = rng.uniform(0.15, 0.5), rng.uniform(0.1, 0.35)
    if kind == "tight":
        activations = rng.uniform(0.94, 0.985) - base
    shortest = 0.2 if kind == "variable lengths" else rng.choice((1.0, 0.9, 0.6, 0.3))
    return Shape(base, activations, rng.randint(8, 16), shortest)


def _course(kind: str, group: Group, rng: Random) -> Course:
    if kind.startswith("waves"):
        return _waves(rng)
    if group in ("growing", "stops"):
        return course(rng, stops=group == "stops")
    return lambda _: 0.3


@dataclass(frozen=True, slots=True)
class Loop:
    """What makes a training loop; `loading` is for how many events the weights are loaded.

    `name` is that of the parameters, and `run` that of the run.
    """

    train: Train
    shape: Shape
    grown: Course
    step_seconds: float
    loading: int
    script: Script
    name: str
    run: str

    def trainer(self, worker: SimulatedRank) -> Trainer:
        """Return the model of a run."""
        parameters, rng = _random(self.name), _random(self.run)
        return Trainer(worker, self.shape, self.script, parameters, rng)


def _random(name: str) -> Random:
    return Random(name)  # noqa: S311 -- a workload, not a secret


def job(kind: str, seed: int, *, is_earlier: bool = False) -> Job:
    """Return a job, or an earlier run with its parameters; equal arguments give equal jobs."""
    group, train = KINDS[kind]
    name = f"{kind}:{seed}"
    run = f"{name}:earlier" if is_earlier else f"{name}:run"
    rng = _random(name)
    shape, grown = _shape(kind, rng), _course(kind, group, rng)
    if is_earlier:
        grown = _otherwise(grown, kind, group, _random(run))
    step_seconds = rng.choice((5.0, 10.0, 20.0, 40.0))
    loading = rng.randint(5, 40)
    uses_neighbor = train in (neighbor, sudden_neighbor)
    script = _script(kind, seed, shape, grown)
    loop = Loop(train, shape, grown, step_seconds, loading, script, f"{name}:parameters", run)
    scenario = Scenario(
        name=f"{kind} {seed}{' earlier' * is_earlier}".replace(" ", "-"),
        summary=train.__doc__ or "",
        reproduces="",
        source="",
        simulated="",
        train=partial(_train, loop),
        gpu_bytes=rng.choice((24, 40, 80, 80, 80, 140)) * GIB,
        neighbors=1 if uses_neighbor else 0,
    )
    # Expandable segments hardly fragment.
    expandable = rng.random() < 0.2 and kind != "fragmentation grows"
    seconds = _seconds(group, grown, rng)
    return Job(kind, group, seed, scenario, step_seconds, seconds, expandable, script, is_earlier)


def _otherwise(grown: Course, kind: str, group: Group, rng: Random) -> Course:
    """Return the course of another run with the same parameters."""
    pace = rng.uniform(1 - PACE_ERROR, 1 + PACE_ERROR)
    level = rng.uniform(1 - LEVEL_ERROR, 1 + LEVEL_ERROR) if group == "stops" else 1.0
    shift = rng.uniform(0, 4 * HOUR) if kind in WAVES else 0.0
    return lambda seconds: level * grown(seconds / pace + shift)


Likeness = Literal["first", "same", "changed"]
"""What ran before a job under its name: nothing, the same parameters, or others."""


@dataclass(frozen=True, slots=True)
class Before:
    """What ran before a job under its name, how much of it until it was canceled, and the pause."""

    likeness: Likeness
    job: Job | None = None
    share: float = 1.0
    pause_seconds: float = 0.0


def before(made: Job) -> Before:
    """Return what ran before a job: in a third of all jobs each nothing, the same, and another."""
    rng = _random(f"before:{made.kind}:{made.seed}")
    likeness: Likeness = rng.choice(("first", "same", "changed"))
    share = 1.0 if rng.random() < 0.75 else rng.uniform(0.1, 1)
    pause = _log_uniform(rng, SHORTEST_PAUSE, LONGEST_PAUSE)
    if likeness == "first":
        return Before(likeness)
    if likeness == "same":
        return Before(likeness, job(made.kind, made.seed, is_earlier=True), share, pause)
    return Before(likeness, job(rng.choice(_alike(made.kind)), made.seed ^ 1), share, pause)


def _alike(kind: str) -> list[str]:
    """Return the kinds that differ from one in their parameters only."""
    what = kind.removesuffix(" grows").removesuffix(" stops")
    return [f"{what} grows", f"{what} stops"] if what in GROWTH else [kind]


def _script(kind: str, seed: int, shape: Shape, grown: Course) -> Script:
    """Return a script that knows its largest batch, except if it searches for it."""
    rng = _random(f"script:{kind}:{seed}")
    longest = shape.room / shape.activations
    highest = max(grown(60.0 * minute) for minute in range(int(LONGEST_SECONDS / 60)))
    if kind == "curriculum grows":
        largest = 1 + longest * rng.uniform(1.02, 1.5)
    elif kind in ("curriculum stops", "waves"):
        largest = 1 + longest * highest
    elif kind.startswith("fragmentation"):
        largest = 1 + 0.5 * min(1.0, highest)
    elif kind == "spike":
        largest = 1.5 * (1 + longest)
    elif kind == "tail":
        largest = (1 + longest) ** rng.uniform(1, 1.3)
    else:
        largest = 1.0
    return Script(None if kind == "search" else largest, rng)


def _seconds(group: Group, grown: Course, rng: Random) -> float:
    """Return how long a job is watched: if it grows, until it dies; otherwise after it stopped."""
    if group in ("growing", "sudden"):
        return LONGEST_SECONDS
    seconds = 0.0
    while group == "stops" and seconds < LONGEST_SECONDS and _grows(grown, seconds):
        seconds += 60
    return min(LONGEST_SECONDS, seconds + rng.uniform(0.5, 4) * HOUR)


def _grows(grown: Course, seconds: float) -> bool:
    return grown(seconds + HOUR / 2) - grown(seconds) > 0.01


def _train(loop: Loop, worker: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Load the model, then train; each event takes the same time."""
    trainer = loop.trainer(worker)
    yield from trainer.load(loop.loading)
    events = 0

    def clock() -> float:
        return events * loop.step_seconds / EVENTS_PER_STEP

    for event in loop.train(trainer, loop.grown, clock):
        yield event
        events += 1
