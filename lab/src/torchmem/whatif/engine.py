"""What a recorded program would have done under other allocator settings, or on other GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchmem.allocator.settings import REQUEST_SETTINGS, AllocatorConfig, parse_alloc_conf
from torchmem.explain.remedies import NEW_VARIABLE, OLD_VARIABLE, conf_variable, export_line
from torchmem.trace.recording import Recording
from torchmem.whatif.fidelity import (
    Progress,
    ReplayProgress,
    caveats,
    reproduce_best,
)
from torchmem.whatif.inference import Inference
from torchmem.whatif.mid_run import decide as decide_mid_run
from torchmem.whatif.mid_run import is_switch, restart_all, switch_all
from torchmem.whatif.program import Program
from torchmem.whatif.recommendation import decide, no_recommendation
from torchmem.whatif.replay import Replayer
from torchmem.whatif.reproduction import Reproduction
from torchmem.whatif.result import Fidelity, Recommendation, ReplayResult, Start, WhatIf
from torchmem.whatif.run_facts import RunFacts, run_facts
from torchmem.whatif.settings import Candidate, candidates, last_parsed, torch_versions

OTHER_GPU = "recorded, this GPU"
"""Name of the row with the recorded settings if the recording needs a larger GPU."""


def no_progress(done: int, total: int) -> None:
    """Ignore the progress of a replay."""


def what_if(  # noqa: PLR0913 - all but the recording are options
    recording: Recording,
    *,
    gpu_bytes: int | None = None,
    total_bytes: int | None = None,
    settings: Sequence[str] | None = None,
    versions: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> WhatIf:
    """Replay a recording under its own settings, and under others if that reproduces it.

    Args:
        recording: one device of one snapshot.
        gpu_bytes: what PyTorch can get of the GPU in bytes, without the CUDA context and other
            processes; an OOM in the trace takes precedence.
        total_bytes: all memory of the GPU in bytes, which a memory fraction refers to; by default
            `gpu_bytes`.
        settings: settings to try instead of the usual ones, as in PYTORCH_CUDA_ALLOC_CONF.
        versions: of torch and cuda or hip, which decide the name of the environment variable; by
            default what the recording tells.
        progress: called a few hundred times for each replay.

    Raises:
        UsageError: the snapshot has settings that no PyTorch writes, a size is not positive, or
            there is nothing to replay.
    """
    run = run_facts(recording, gpu_bytes, total_bytes, versions or {})
    gpu_known = run.gpu_bytes is not None
    tried = candidates(recording, run.settings, settings, gpu_known=gpu_known)
    # With memory from before the trace, each setting is replayed twice: switched, and after a
    # restart.
    rounds = 2 if run.before.segments else 1
    replays = ReplayProgress(progress, max(1, run.events), 2 + rounds * len(tried))
    reproduction, fidelity, inference = reproduce_best(run, replays)
    answer = WhatIf(
        recording.name,
        recording.device,
        run.events,
        run.gpu_bytes,
        run.gpu_source,
        fidelity,
        (_recorded(run, reproduction),),
        no_recommendation(fidelity),
        caveats(run, reproduction, inference, fidelity),
    )
    if not fidelity.trusted:
        return answer
    answer = _with_replays(answer, run, reproduction.program, inference, tried, replays)
    known = versions or torch_versions(recording)
    return replace(answer, verdict=_with_line(recording, answer, known))


def _with_replays(  # noqa: PLR0913, PLR0917 - one step of what_if
    answer: WhatIf,
    run: RunFacts,
    program: Program,
    inference: Inference,
    tried: Sequence[Candidate],
    progress: ReplayProgress,
) -> WhatIf:
    """Return the answer with the replays of other settings, and the verdict that follows."""
    (recorded,) = answer.outcomes
    gpus = (run.gpu_bytes, run.total_bytes) if _is_limited(run) else (None, None)
    replayer = Replayer(program, inference, run.events, *gpus, progress.on_sample)
    if not run.before.segments:
        baseline, others = _replay_all(run, replayer, tried, recorded, progress)
        verdict = decide(answer.fidelity, baseline, others)
        baselines = () if baseline is recorded else (baseline,)
        return replace(answer, outcomes=(recorded, *baselines, *others), verdict=verdict)
    counted = progress.count(switch_all(run, replayer, tried))
    switched = tuple(counted)
    said = progress.count(restart_all(run, replayer, tried, recorded))
    restarts = tuple(restart for restart in said if restart is not None)
    verdict = decide_mid_run(answer.fidelity, recorded, switched, restarts)
    return replace(
        answer,
        gpu_bytes=gpus[0],
        gpu_source=run.gpu_source if gpus[0] is not None else None,
        outcomes=(recorded, *switched),
        restarts=restarts,
        verdict=verdict,
    )


def _is_limited(run: RunFacts) -> bool:
    """Return whether the GPU limits replays: not if the earlier memory exceeds it."""
    return run.fits_gpu or not run.before.segments


def _recorded(run: RunFacts, reproduction: Reproduction) -> ReplayResult:
    start: Start = "recorded" if run.before.segments else "empty"
    settings = run.settings
    return reproduction.executor.result(settings.name, settings.conf, start, run.events)


def _replay_all(
    run: RunFacts,
    replayer: Replayer,
    tried: Sequence[Candidate],
    recorded: ReplayResult,
    progress: ReplayProgress,
) -> tuple[ReplayResult, tuple[ReplayResult, ...]]:
    """Return the recorded settings on this GPU, and the others, for a complete trace."""
    baseline, settings = recorded, run.settings
    if run.gpu_bytes is not None and not run.fits_gpu:
        baseline = replayer.replay(OTHER_GPU, settings.conf, settings.config)
    progress.finish_replay()
    calls = [
        partial(replayer.replay, setting.name, setting.conf, setting.config)
        if setting.refused is None
        else partial(ReplayResult, setting.name, setting.conf, setting.refused)
        for setting in tried
    ]
    return baseline, tuple(progress.count(replayer.all(calls)))


def _with_line(recording: Recording, answer: WhatIf, versions: Mapping[str, str]) -> Recommendation:
    """Return the verdict with the command to type."""
    verdict = answer.verdict
    conf = next((each.conf for each in answer.outcomes if each.name == verdict.recommended), None)
    if conf is None:
        return verdict
    if is_switch(answer):
        return replace(verdict, line=f"torch.cuda.memory._set_allocator_settings({conf!r})")
    return replace(verdict, line=line_to_type(recording, conf, versions))


def line_to_type(recording: Recording, conf: str, versions: Mapping[str, str]) -> str:
    """Return the shell command that sets `conf` and keeps unrelated recorded settings.

    Its variable is the one for these `versions`. PyTorch prefers the old name if both are set, so
    the command unsets that if the recorded process had settings.
    """
    unrelated = {
        key: value
        for key, value in last_parsed(recording).items()
        if key not in REQUEST_SETTINGS - {"per_process_memory_fraction"}
    }
    variable, resulting = conf_variable(versions), unrelated | parse_alloc_conf(conf)
    line = export_line(resulting, variable)
    is_new = variable == NEW_VARIABLE and bool(last_parsed(recording))
    return f"{export_line({}, OLD_VARIABLE)}; {line}" if is_new else line


@dataclass(frozen=True, slots=True)
class SimulatedGpuMemory:
    """A GPU to replay on: `obtainable` bytes for PyTorch, of `total` bytes."""

    name: str
    obtainable: int
    total: int


def on_gpus(
    recording: Recording,
    own: SimulatedGpuMemory,
    gpus: Sequence[SimulatedGpuMemory],
    answer: WhatIf,
    progress: Progress = no_progress,
) -> tuple[ReplayResult, ...]:
    """Replay a recording under its own settings on other GPUs.

    Args:
        recording: one device of one snapshot.
        own: the GPU that it was recorded on.
        gpus: the GPUs to replay it on.
        answer: the answer of `what_if` for the same recording, with a trusted fidelity.
        progress: called a few hundred times for each replay.

    Returns:
        One result for each of `gpus`, with the name of the GPU.

    Raises:
        UsageError: as `what_if`.
    """
    run = run_facts(recording, own.obtainable, own.total, {})
    replays = ReplayProgress(progress, max(1, run.events), 1 + len(gpus))
    reproduced: tuple[Reproduction, Fidelity, Inference] | None = None
    unlimited, results = answer.outcomes[0], dict[str, ReplayResult]()
    # The largest first: a replay that met no limit stands for all smaller GPUs that its peak fits.
    for gpu in sorted(gpus, key=lambda gpu: gpu.obtainable, reverse=True):
        if _is_same(unlimited, run.settings.config, gpu):
            results[gpu.name] = replace(unlimited, name=gpu.name)
            continue
        reproduced = reproduced or reproduce_best(run, replays)
        program, memory = reproduced[0].program, (gpu.obtainable, gpu.total)
        replayer = Replayer(program, reproduced[2], run.events, *memory, replays.on_sample)
        result = replayer.replay(gpu.name, run.settings.conf, run.settings.config)
        replays.finish_replay()
        results[gpu.name] = result
        unlimited = unlimited if _met_no_limit(unlimited) else result
    return tuple(results[gpu.name] for gpu in gpus)


def _is_same(unlimited: ReplayResult, config: AllocatorConfig, gpu: SimulatedGpuMemory) -> bool:
    """Return whether `GPU` has so much room that a replay would equal one without a limit."""
    return (
        _met_no_limit(unlimited)
        and config.per_process_memory_fraction == 1
        and unlimited.peak_reserved <= gpu.obtainable
    )


def _met_no_limit(result: ReplayResult) -> bool:
    return not (result.retries or result.ooms)
