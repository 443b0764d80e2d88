"""What to do after a message, and the one command that tells more than the message does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmem.allocator.sizes import format_size
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy
from torchmem.explain.serving import waking
from torchmem.explain.texts.formats import TextCause
from torchmem.explain.texts.judgment import Judged
from torchmem.explain.texts.numbers import Message, Numbers
from torchmem.explain.texts.words import PHRASES
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind

MAX_REMEDIES = 4
MIN_FRACTION = 0.1
"""No engine starts with a smaller share of the GPU."""


@dataclass(frozen=True, slots=True)
class NextCommand:
    """A command to type, and what it tells."""

    line: str
    tells: str


RUN = NextCommand(
    "torchmem run -- python train.py",
    "what holds the memory at the next OOM, whether it had grown, and which line asks for more",
)
TRACE = NextCommand(
    "TORCHMEM_CAPTURE_ON_OOM=trace torchmem run -- python train.py",
    "under which allocator setting the run would go on, by a replay of the next OOM",
)
PROCESSES = NextCommand(
    "nvidia-smi --query-compute-apps=gpu_uuid,pid,name,used_memory --format=csv",
    "which processes are on the GPU now",
)
KERNEL = NextCommand(
    "dmesg --ctime | grep -i -B 1 'killed process'",
    "which process the kernel killed, when, and how much host memory it had",
)
_BY_CAUSE: Mapping[TextCause | None, NextCommand] = {
    "fragmentation": TRACE,
    "external": PROCESSES,
    "host_memory": KERNEL,
    "refused": NextCommand(
        "torchmem doctor", "what this machine's driver, container and settings do not allow"
    ),
}
_KINDS: Mapping[TextCause, tuple[RemedyKind, ...]] = {
    "capacity": ("smaller_batch", "recompute", "shard_if_large"),
    "fragmentation": ("expandable_segments",),
    "limit": ("raised_limit",),
    "refused": ("driver_limit",),
    "external": ("find_processes", "other_gpu"),
    "pending": ("repeat",),
    "library": ("cache_for_libraries", "room_for_libraries"),
    "host_memory": ("host_memory",),
}
_POOL: tuple[RemedyKind, ...] = ("shared_pool", "pool_on_oom", "expandable_segments")
_BY_FORMAT: Mapping[str, NextCommand] = {
    "oom_killed": NextCommand(
        "kubectl describe pod POD", "the limit of the container, and how often it was restarted"
    ),
    "slurm_oom": NextCommand(
        "sacct --jobs JOB --format JobID,State,ReqMem,MaxRSS",
        "what the job had requested, and what its tasks had used",
    ),
    "wake_up": PROCESSES,
    "pytorch_1eb": NextCommand(
        "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun train.py",
        "whether all ranks take part in the same collectives, with the same sizes",
    ),
}


def next_command(message: Message, judged: Judged) -> NextCommand:
    """Return the one command that tells more."""
    if judged.cause == "external" and judged.holders and judged.holders[0].pid is not None:
        line = f"ps -o pid,user,lstart,args -p {judged.holders[0].pid}"
        return NextCommand(line, "whose process it is, and since when it runs")
    return _BY_FORMAT.get(message.format.name) or _BY_CAUSE.get(judged.cause, RUN)


def advice(message: Message, judged: Judged) -> tuple[Remedy, ...]:
    """Return what to do, the most promising first; for each cause, if several are possible."""
    if judged.candidates:
        # With cudaMallocAsync, PyTorch has no settings against fragmentation.
        return by_cause(judged.candidates) if message.format.name == "pytorch" else ()
    if judged.detail == "pool":
        return tuple(Remedy(kind, f"{REMEDY_WORDS[kind]}.") for kind in _POOL)
    if judged.report is not None:
        return remedies(judged.report)[:MAX_REMEDIES]
    special = _SPECIAL.get(message.format.name)
    return tuple(special(message.numbers, judged.cause) if special else _general(judged.cause))


def by_cause(causes: Sequence[TextCause]) -> tuple[Remedy, ...]:
    """Return the first thing to do for each of the causes that are possible."""
    kinds = [(cause, _KINDS[cause][0]) for cause in causes]
    return tuple(Remedy(kind, f"If {PHRASES[cause]}: {_lower(kind)}.") for cause, kind in kinds)


def _lower(kind: RemedyKind) -> str:
    return f"{REMEDY_WORDS[kind][0].lower()}{REMEDY_WORDS[kind][1:]}"


def _general(cause: TextCause | None) -> Iterator[Remedy]:
    if cause is not None:
        yield from (Remedy(kind, f"{REMEDY_WORDS[kind]}.") for kind in _KINDS[cause])


def _vllm_start(numbers: Numbers, cause: TextCause | None) -> Iterator[Remedy]:
    yield from _general("external" if cause == "external" else None)
    free, total = numbers.free, numbers.total
    if free and total and free / total >= MIN_FRACTION:
        fraction = math.floor(100 * free / total) / 100
        yield Remedy(
            None,
            f"Ask for what is free: {format_size(free)} of {format_size(total)}.",
            (f"--gpu-memory-utilization={fraction:.2f}",),
        )


def _vllm_cache(numbers: Numbers, _: TextCause | None) -> Iterator[Remedy]:
    if numbers.tokens:
        yield Remedy(
            None,
            "Serve shorter requests: by vLLM's estimate, this length fits.",
            (f"--max-model-len={numbers.tokens}",),
        )
    yield Remedy(
        None,
        "If the GPU has more free memory, let vLLM use a larger share of it.",
        ("--gpu-memory-utilization=0.95",),
    )
    yield Remedy(
        None,
        "Run smaller batches, which leaves more for the KV cache.",
        ("--max-num-seqs=128", "--max-num-batched-tokens=2048"),
    )


def _vllm_profiling(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(
        None,
        "Start the engine when nothing else on the GPU starts or ends, or give the size of the KV "
        "cache, which needs no measurement.",
        ("--kv-cache-memory=BYTES",),
    )


def _sglang_fraction(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(
        None,
        "Let SGLang use a larger share of the GPU for weights and KV cache.",
        ("--mem-fraction-static=0.9",),
    )
    yield Remedy("fewer_bits", f"{REMEDY_WORDS['fewer_bits']}.")


def _sglang_cache(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(
        None,
        "Run fewer requests at a time, and divide long prompts.",
        ("--max-running-requests=64", "--chunked-prefill-size=2048"),
    )


def _wake_up(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield from (Remedy(each.kind, each.text, each.lines) for each in waking("vllm", None))


def _wrong_size(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy("shape", f"{REMEDY_WORDS['shape']}.")
    yield Remedy(
        None,
        "If the size came from another rank, such as in broadcast_object_list, look for an earlier "
        "collective that failed or that ranks called in a different order: the size is then a "
        "random number.",
    )


def _driver(_: Numbers, cause: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(
        "find_processes",
        "If the process had just started, find out which other processes fill the GPU.",
        ("nvidia-smi",),
    )
    yield from _general(cause)


def _without_expandable(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(
        None,
        "Turn expandable segments off.",
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",),
    )


def _nvml(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(
        None,
        "Let NVML work, so that the next message has its numbers: `nvidia-smi` in the same "
        "container says what is wrong with it.",
    )


def _watermark(_: Numbers, __: TextCause | None) -> Iterator[Remedy]:
    yield Remedy(None, "Use a smaller batch, or close programs that use memory: the GPU shares it.")


_SPECIAL: Mapping[str, Callable[[Numbers, TextCause | None], Iterator[Remedy]]] = {
    "vllm_free_memory": _vllm_start,
    "vllm_no_cache": _vllm_cache,
    "vllm_small_cache": _vllm_cache,
    "vllm_profiling": _vllm_profiling,
    "sglang_fraction": _sglang_fraction,
    "sglang_cache_full": _sglang_cache,
    "wake_up": _wake_up,
    "pytorch_1eb": _wrong_size,
    "driver": _driver,
    "nvml_assert": _nvml,
    "expandable_assert": _without_expandable,
    "not_ready": _without_expandable,
    "mps": _watermark,
}
