"""The verdict on an OutOfMemoryError in one sentence, as a colleague would say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchmem.allocator.sizes import GIB, MIB, format_size
from torchmem.explain.call_stack import public_place
from torchmem.explain.lines import leaking_line
from torchmem.explain.oom_report import CAUSE_SUMMARIES, OomReport
from torchmem.explain.tensor_shares import is_model_alone
from torchmem.explain.threat_words import KEPT_TENSORS, LEAKS
from torchmem.explain.verdict import Gain, OnsetEvidence, Verdict
from torchmem.metrics.memory_parts import COMPONENTS
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import Onset, OomCause, OomRecord

ONSET_SUMMARIES: Mapping[Onset, str] = {
    "first_step": "no step had finished",
    "leak": "tensors kept between steps grew",
    "garbage": "tensors were in reference cycles that Python's collector had not reached",
    "larger_step": "steps needed more than before",
    "new_phase": "something new needed memory",
    "outside": "memory outside PyTorch's allocator grew",
    "stranded": "more free memory was stranded than before",
    "tight": "nothing had changed: an ordinary step reached the limit",
}
"""What had changed, for when the numbers are not available."""

MAX_DECIMALS = 6
_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}
_DECIMALS = {"bytes": 0, "KiB": 2, "MiB": 2, "GiB": 2}


def headline(report: OomReport) -> str:
    """Return the verdict as one sentence with numbers, without a full stop."""
    verdict = report.verdict
    if verdict is None or verdict.why is None:
        return _cause(report, None)
    why, gain = verdict.why, next(iter(verdict.material), None)
    if verdict.cause == "capacity":
        return _ONSETS[why.onset](report, why)
    if why.onset in {"leak", "garbage", "larger_step", "new_phase", "outside"}:
        return _both(report, verdict, why, gain)
    return f"{_cause(report, gain)}{_TAILS[why.onset]}"


def short_headline(oom: OomRecord) -> str:
    """Return the verdict where only the record of the OOM is known, without a full stop."""
    summary = CAUSE_SUMMARIES[oom.cause]
    if oom.onset is None:
        return f"{oom.cause}: {summary}"
    if oom.cause == "capacity":
        return f"{oom.onset}: {ONSET_SUMMARIES[oom.onset]}"
    return f"{oom.cause}: {summary}, and {ONSET_SUMMARIES[oom.onset]}"


def growth_sentence(growth: Growth, steps_left: float | None) -> str:
    """Return what grows in a rank that runs, and when it is full, without a full stop."""
    rate = format_size(round(growth.bytes_per_step))
    kept = _component(growth.component)
    what = {
        "kept": LEAKS.format(what=kept, pace=rate)
        if growth.is_leak
        else f"{kept[0].upper()}{kept[1:]} grow by {rate} a step",
        "larger_step": f"Steps need {rate} more from step to step",
        "outside": f"Memory outside PyTorch's allocator grows by {rate} a step",
    }[growth.kind]
    since = f" since step {growth.since_step:,}" if growth.since_step > 1 else ""
    full = "" if steps_left is None else f", full in about {_steps(steps_left)}"
    return f"{what}{since}{full}"


def _both(report: OomReport, verdict: Verdict, why: OnsetEvidence, gain: Gain | None) -> str:
    """Return growth and cause, the larger one first."""
    onset, cause = _ONSETS[why.onset](report, why), _cause(report, gain)
    if why.onset == "outside" and verdict.cause == "external":
        return onset
    is_smaller = gain is not None and gain.bytes > (why.bytes or 0) and why.onset != "garbage"
    if is_smaller and verdict.cause != "library":
        return f"{cause}; {onset[0].lower()}{onset[1:]}"
    further = ""
    if gain is not None and gain.steps is not None:
        further = f", which would have been room for about {_steps(gain.steps)} more"
    return f"{onset}; {cause[0].lower()}{cause[1:]}{further}"


def _steps(number: float) -> str:
    rounded = max(0, int(number))
    return f"{rounded:,} step{'s' * (rounded != 1)}"


def _component(name: str | None) -> str:
    if name is None or name == "held":
        return KEPT_TENSORS
    return COMPONENTS[name].words if name in COMPONENTS else f"the tensors of {name}"


def _leak(report: OomReport, why: OnsetEvidence) -> str:
    grown, done = why.bytes or 0, _steps_of_growth(report, why)
    return (
        f"Memory leak: {_component(why.component)} grew by {_rate(grown, done)} a step for "
        f"{_steps(done)} ({format_size(grown)}){_at_line(report, why)}"
    )


def _steps_of_growth(report: OomReport, why: OnsetEvidence) -> int:
    return max(1, report.steps.count - (why.since_step or 0))


def _rate(total: int, steps: int) -> str:
    """Return the mean growth a step, with as many decimals as its product with `steps` needs.

    The product of the printed numbers is then the printed total.
    """
    mean = total / steps
    unit = format_size(round(mean)).split()[1]
    scale = _BYTES[unit]
    texts = (f"{mean / scale:.{decimals}f}" for decimals in range(_DECIMALS[unit], MAX_DECIMALS))
    for text in texts:
        if format_size(round(float(text) * scale * steps)) == format_size(total):
            return f"{text} {unit}"
    return f"{mean / scale:.{MAX_DECIMALS}f} {unit}"


def _at_line(report: OomReport, why: OnsetEvidence) -> str:
    line = leaking_line(report.lines, why.bytes_per_step or 0)
    return "" if line is None else f", allocated at {' in '.join(public_place(line))}"


def _garbage(report: OomReport, why: OnsetEvidence) -> str:
    return (
        f"Garbage: {format_size(why.bytes or 0)} of tensors was in reference cycles that Python's "
        f"collector had not reached{report.garbage.origin if report.garbage else ''}"
    )


def _larger_step(report: OomReport, why: OnsetEvidence) -> str:
    more = format_size(why.bytes or 0)
    if why.bytes_per_step is not None:
        done = _steps_of_growth(report, why)
        rate = _rate(why.bytes or 0, done)
        return f"Steps needed more and more: {rate} more in each of {_steps(done)}, {more} in all"
    return (
        f"One step needed at least {more} more than any of the {_steps(report.steps.count)} before"
    )


def _first_step(report: OomReport, _: OnsetEvidence) -> str:
    free = report.driver_free_bytes + report.cached_free_bytes
    missing = (report.oom.requested_bytes or 0) - free
    where = " in the backward pass" if report.origin and report.origin.backward is not None else ""
    step = f"Step {report.steps.count + 1}" if report.steps.count else "A step"
    if is_model_alone(report):
        step = "The model"
    if missing <= 0:
        return f"{step} does not fit{where}"
    return f"{step} does not fit{where}: it needs at least {format_size(missing)} more"


def _new_phase(report: OomReport, why: OnsetEvidence) -> str:
    more = "" if not why.bytes else format_size(why.bytes)
    if why.phase is None:
        return f"Tensors of {more} that stay appeared around step {why.since_step or 0:,}"
    than = f" needed at least {more} more than any step" if more else " did not fit beside training"
    name = why.phase if why.phase.endswith("()") else f"The phase {why.phase}"
    return f"{name}{than} ({_steps(report.steps.count)} had finished)"


def _outside(report: OomReport, why: OnsetEvidence) -> str:
    grown, done = format_size(why.bytes or 0), _steps_of_growth(report, why)
    mean = f" ({_rate(why.bytes or 0, done)} a step for {_steps(done)})"
    rate = mean if why.bytes_per_step else ""
    return (
        f"Memory outside PyTorch's allocator grew by {grown}{rate}: other processes, or libraries "
        "of this one"
    )


def _stranded(report: OomReport, why: OnsetEvidence) -> str:
    return f"{_share(report, why.bytes or 0)} was free but stranded, too little to matter"


def _tight(report: OomReport, _: OnsetEvidence) -> str:
    allocator = report.device.allocator
    held = f" with {format_size(allocator.allocated_bytes.total)} of tensors" if allocator else ""
    return f"The GPU was full{held}: an ordinary step reached the limit"


_ONSETS: Mapping[Onset, Callable[[OomReport, OnsetEvidence], str]] = {
    "first_step": _first_step,
    "leak": _leak,
    "garbage": _garbage,
    "larger_step": _larger_step,
    "new_phase": _new_phase,
    "outside": _outside,
    "stranded": _stranded,
    "tight": _tight,
}
_TAILS: Mapping[Onset, str] = {
    "first_step": ", in the first step",
    "stranded": "",
    "tight": "",
}


def _share(report: OomReport, size: int) -> str:
    total = report.device.total_bytes
    share = f" ({size / total:.0%} of the GPU)" if total else ""
    return f"{format_size(size)}{share}"


def _fragmentation(report: OomReport) -> str:
    """Return where the free bytes are: in private pools, or beside live tensors."""
    free, in_pools = report.cached_free_bytes, report.private_free_bytes
    if report.oom.detail == "pool" and in_pools > free:
        return (
            f"Fragmentation: {_share(report, in_pools)} was free in the pools of CUDA graphs and "
            "MemPools, which this request cannot use"
        )
    return f"Fragmentation: {_share(report, free)} was free but stranded"


def _wake_up(report: OomReport) -> str:
    """Return what the engine lacked, and who had it."""
    missing = (report.oom.requested_bytes or 0) - report.driver_free_bytes
    lacked = f"The engine could not wake up: {format_size(max(0, missing))} was missing"
    if report.oom.cause == "external" and report.outside_bytes is not None:
        return f"{lacked}, and {_share(report, report.outside_bytes)} was held by other processes"
    if report.oom.cause == "library" and report.layout is not None:
        cached = format_size(report.layout.releasable_bytes)
        return f"{lacked}, while PyTorch cached {cached} in this process"
    return lacked


def refusal(requested: int, free: int) -> str:
    """Return that the driver refused memory that was free."""
    return f"The driver refused {format_size(requested)}, although {format_size(free)} was free"


def _limit(report: OomReport) -> str:
    """Return whose limit was reached: the driver's, or the memory fraction's."""
    if report.oom.detail == "driver":
        return refusal(report.oom.requested_bytes or 0, report.driver_free_bytes)
    if report.limit_bytes is None:
        return _summary("limit")
    free, limit = format_size(report.driver_free_bytes), _share(report, report.limit_bytes)
    return f"The memory fraction of {limit} was reached, while {free} was free at the driver"


def _summary(cause: OomCause) -> str:
    text = CAUSE_SUMMARIES[cause]
    return f"{text[0].upper()}{text[1:]}"


def _cause(report: OomReport, gain: Gain | None) -> str:
    """Return the cause with its numbers."""
    cause: OomCause = report.oom.cause
    if report.oom.at_wake_up:
        return _wake_up(report)
    if cause == "fragmentation":
        return _fragmentation(report)
    if cause == "limit":
        return _limit(report)
    if cause == "external" and report.outside_bytes is not None:
        held = _share(report, report.outside_bytes)
        return f"{held} was held outside this process's allocator, by other processes"
    if cause == "library" and gain is not None and gain.matters:
        cached = format_size(gain.bytes)
        return f"A library got no memory from the driver, while PyTorch cached {cached} more"
    return _summary(cause)
