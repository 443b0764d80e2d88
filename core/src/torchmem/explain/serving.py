"""What helps an inference engine that runs out of memory, in the words of vLLM's arguments.

The arguments are those of vLLM 0.33 (vllm/engine/arg_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmem.allocator.sizes import MIB, format_size
from torchmem.sample.engine import Engine
from torchmem.sample.remedy_words import RemedyKind
from torchmem.sample.sample import DeviceSample

SPARE_BYTES = 150 * MIB
"""What vLLM leaves free beside its plan (v1/worker/gpu_worker.py, `redundancy_buffer_memory`)."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and the lines to type."""

    kind: RemedyKind
    text: str
    lines: tuple[str, ...]


def awake_cache(resident: Mapping[str, int]) -> str | None:
    """Return, in one sentence, what an engine holds that no other process can get."""
    cache = resident.get("kv_cache", 0)
    if not cache:
        return None
    return (
        f"its inference engine holds {format_size(cache)} in the KV cache, which only sleep mode "
        "returns: have the engine's owner call sleep()."
    )


def serves(device: DeviceSample) -> bool:
    """Return whether the process serves requests, and does not train beside its engine."""
    trains = {"gradients", "optimizer_state", "gradients_or_step"} & device.components.keys()
    return device.engine is not None and not trains


def engine_advice(engine: Engine, requested: int | None) -> Iterator[Advice]:
    """Yield what makes room for a failed request of these bytes, which may be unknown."""
    if engine.asleep:
        yield from _waking(engine)
        return
    yield from _smaller_cache(engine, requested or 0)
    yield Advice(
        "fewer_requests",
        "Run smaller batches: fewer requests at a time, and fewer tokens of long prompts, which "
        "chunked prefill divides.",
        ("--max-num-seqs=128", "--max-num-batched-tokens=2048"),
    )
    graphs = engine.resident.get("cudagraph", 0)
    if graphs:
        yield Advice(
            "fewer_graphs",
            f"Capture fewer CUDA graphs, which take {format_size(graphs)}, or none.",
            ("--max-cudagraph-capture-size=64", "--enforce-eager"),
        )
    lora = engine.resident.get("lora", 0)
    if lora:
        yield Advice(
            "fewer_adapters",
            f"Keep fewer or smaller LoRA adapters on the GPU: their buffers take "
            f"{format_size(lora)}.",
            ("--max-loras=1", "--max-lora-rank=16"),
        )


def _smaller_cache(engine: Engine, requested: int) -> Iterator[Advice]:
    """Yield a smaller KV cache: what fits by the peaks so far, or less by the failed request."""
    cache = engine.resident.get("kv_cache", 0)
    advised = engine.kv_cache_advice_bytes
    smaller = cache - requested - SPARE_BYTES
    size = smaller if advised is None else min(advised, smaller)
    if cache and size > 0:
        yield Advice(
            "kv_cache",
            f"Leave more memory for activations: the KV cache has {format_size(cache)}.",
            (f"--kv-cache-memory={size}",),
        )


def _waking(engine: Engine) -> Iterator[Advice]:
    yield Advice(
        "before_wake_up",
        f"Return memory to the driver before wake_up: {format_size(engine.asleep_bytes)} of the "
        "engine is asleep. A trainer calls session.release() or empties its cache.",
        ("torch.cuda.empty_cache()", "torchmem_engine_wake_margin_bytes"),
    )
    yield Advice(
        "weights_first",
        "Wake the weights first, and the KV cache only when the weights are updated.",
        ('wake_up(tags=["weights"])', 'wake_up(tags=["kv_cache"])'),
    )
    yield Advice(
        "smaller_engine",
        "Give the engine less of the GPU. Restart it after a failed wake-up: it is half awake.",
        ("--gpu-memory-utilization=0.5",),
    )
