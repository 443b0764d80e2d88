"""How faithfully a replay reproduces a recording, and the limitations of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from torchmem.allocator.sizes import format_size
from torchmem.sample.errors import UsageError
from torchmem.simulator.blocks import BlockOrder
from torchmem.whatif.inference import Inference
from torchmem.whatif.recommendation import PEAK_MARGIN
from torchmem.whatif.reproduction import Reproduction, reproduce
from torchmem.whatif.result import Fidelity
from torchmem.whatif.run_facts import RunFacts, met_limit

MIN_SHARE = 0.95
"""The smallest share of allocations on their recorded address that is trusted.

Each wrong address leads to more of them: a faithful replay has none or few, a wrong one soon has
little else. In 17 public traces, all 52,829 allocations landed; an 18th trace failed from its event
179 on.
"""
MIN_ALLOCATIONS = 1

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the number of events replayed so far, and of all replays together."""

ALWAYS = (
    (
        "The program is assumed to request the same sizes in the same order, and to free them at "
        "the same points, under every setting. A program that reacts to its free memory would not."
    ),
    (
        "The driver is assumed to return exactly the memory that it is asked for. Time is not "
        "replayed: the cost of mapping pages and of waiting for the GPU shows only in the number "
        "of driver calls."
    ),
    (
        "A call of torch.cuda.empty_cache() that had nothing to release leaves no trace and is not "
        "repeated."
    ),
)


@dataclass(slots=True)
class ReplayProgress:
    """Progress over several replays of the same trace."""

    report: Progress
    events: int
    replays: int
    done: int = 0

    def on_sample(self, number: int) -> None:
        """Report the number of events of the current replay."""
        self.report(self.done * self.events + number, self.replays * self.events)

    def finish_replay(self) -> None:
        """End the current replay."""
        self.done += 1

    def count(self, replays: Iterable[T]) -> Iterator[T]:
        """Yield the results of replays, in their order."""
        for result in replays:
            self.finish_replay()
            self.on_sample(0)  # replays in other processes report nothing themselves
            yield result


def reproduce_best(
    run: RunFacts, progress: ReplayProgress
) -> tuple[Reproduction, Fidelity, Inference]:
    """Reproduce a recording by the best explanation, and if that fails, by the others.

    Return the best reproduction, its fidelity, and its explanation.

    Raises:
        UsageError: the trace contradicts itself.
    """
    tried = list[tuple[Reproduction, Inference]]()
    for inference in run.inferences:
        # An explanation that is worse than the best one so far need not be replayed to its end.
        max_misses = min((other.misses for other, _ in tried), default=run.events)
        try:
            reproduction = reproduce(
                run, inference, max_misses=max_misses, on_sample=progress.on_sample
            )
        except (KeyError, ValueError) as error:  # blocks or segments that exist twice
            raise UsageError(
                f"{run.recording.name} contradicts itself, so it is damaged: record it again."
            ) from error
        tried.append((reproduction, inference))
        if not reproduction.misses:
            break
    progress.finish_replay()
    reproduction, inference = min(tried, key=lambda pair: pair[0].misses)
    equal = [other for other in run.inferences if other.contradictions == inference.contradictions]
    order = inference.order if len(equal) == 1 else None
    return reproduction, judge(run, reproduction, order), inference


def judge(run: RunFacts, reproduction: Reproduction, order: BlockOrder | None) -> Fidelity:
    """Return the fidelity of a reproduction under this order; None if several match equally."""
    fidelity = Fidelity(
        allocations=reproduction.allocations,
        landed=reproduction.landed,
        first_miss=reproduction.first_miss,
        block_order=order,
        recorded_peak_reserved=run.peak_reserved,
        replayed_peak_reserved=reproduction.executor.peak_reserved,
    )
    return replace(fidelity, reason=_distrust(fidelity))


def _distrust(fidelity: Fidelity) -> str | None:
    if fidelity.allocations < MIN_ALLOCATIONS:
        return (
            "the trace has no allocation. Record with torch.cuda.memory._record_memory_history()."
        )
    if fidelity.share < MIN_SHARE:
        return (
            f"the replay under your own settings puts only {fidelity.share:.1%} of the allocations "
            f"where PyTorch put them, and first differs at event {fidelity.first_miss:,}. Record "
            "from the start of the program, without skipping kinds of entries."
        )
    recorded, replayed = fidelity.recorded_peak_reserved, fidelity.replayed_peak_reserved
    if abs(replayed - recorded) > PEAK_MARGIN * recorded:
        return (
            f"the replay under your own settings reserves {format_size(replayed)} at its peak, but "
            f"the recording {format_size(recorded)}. Record from the start of the program."
        )
    return None


def caveats(
    run: RunFacts, reproduction: Reproduction, inference: Inference, fidelity: Fidelity
) -> tuple[str, ...]:
    """Return the limitations of the answer as sentences, the most serious first."""
    return (
        *_gpu_caveats(run, reproduction),
        *_start_caveats(run, inference),
        *_miss_caveats(fidelity),
        *ALWAYS,
    )


def _gpu_caveats(run: RunFacts, reproduction: Reproduction) -> Iterator[str]:
    gpu, peak = run.gpu_bytes, run.peak_reserved
    if gpu is None:
        yield (
            "The memory that PyTorch could get is not known, so no setting can run out of it: peak "
            "reserved is what each setting needs to run without a retry."
        )
    elif run.gpu_source == "oom" and peak > gpu:
        yield (
            f"PyTorch could get {format_size(gpu)} when the request failed, but had reserved "
            f"{format_size(peak)} before: another process took memory in between. All settings are "
            "replayed with the smaller amount throughout."
        )
    elif run.gpu_source == "oom" and _was_limited(run):
        yield (
            "A request failed although the driver had room, so the process has a limit of its own "
            f"(a memory fraction). It is assumed to be {format_size(gpu)}, the peak of reserved "
            "memory; it may be slightly higher."
        )
    if reproduction.doubtful:
        yield (
            f"Cache was released {reproduction.doubtful:,} times right before a request that "
            "needed new memory. This counts as torch.cuda.empty_cache(), but may have been the "
            "allocator's retry on a full GPU. Pass --gpu-model to distinguish the two."
        )


def _was_limited(run: RunFacts) -> bool:
    return any(event.action == "oom" and met_limit(event) for event in run.recording.events)


def _start_caveats(run: RunFacts, inference: Inference) -> Iterator[str]:
    segments = run.before.segments
    if segments:
        active = format_size(sum(segment["active_size"] for segment in segments))
        reserved = format_size(sum(segment["total_size"] for segment in segments))
        yield (
            f"The trace does not begin with the program: {active} were in use and {reserved} "
            "reserved. Settings are switched at that moment. What a restart with them would "
            "reserve is estimated where estimates were shown to hold."
        )
        if run.recording.facts.allocated_peak_bytes is None:
            yield (
                "How much memory was allocated before the trace is not known; if it was more than "
                "in the trace, a restart reserves more than estimated. torchmem capture records it."
            )
        if inference.order == "address":
            yield (
                "Up to PyTorch 2.11, the choice among free blocks of equal size depends on the "
                "addresses of new memory, which are not known for other settings."
            )
    if run.recording.truncated:
        yield (
            "The oldest entries of the trace were overwritten; record with a larger max_entries, "
            "which is a flag of torchmem capture, too."
        )


def _miss_caveats(fidelity: Fidelity) -> Iterator[str]:
    missed = fidelity.allocations - fidelity.landed
    if fidelity.trusted and missed:
        yield (
            f"{missed:,} of {fidelity.allocations:,} allocations got another address than in the "
            f"recording, the first at event {fidelity.first_miss:,}."
        )
