"""What helps an inference engine that runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmem.allocator.sizes import MIB, format_size
from torchmem.explain.engine_arguments import arguments_of
from torchmem.sample.engine import Engine
from torchmem.sample.remedy_words import RemedyKind
from torchmem.sample.sample import DeviceSample

SPARE_BYTES = 150 * MIB
"""What stays free beside the plan, as in vLLM (v1/worker/gpu_worker.py, redundancy_buffer_memory):
its profile run does not see all that libraries allocate later."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and the lines to type."""

    kind: RemedyKind
    text: str
    lines: tuple[str, ...] = ()


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
        yield from waking(engine.name, engine.asleep_bytes)
        return
    known = arguments_of(engine.name)
    yield from _smaller_cache(engine, requested or 0)
    yield Advice(
        "fewer_requests",
        "Run smaller batches: fewer requests at a time, and fewer tokens of long prompts, which "
        "chunked prefill divides.",
        known.smaller_batches,
    )
    graphs = engine.resident.get("cudagraph", 0)
    if graphs:
        text = f"Capture fewer CUDA graphs, which take {format_size(graphs)}, or none."
        yield Advice("fewer_graphs", text, known.fewer_graphs)
    lora = engine.resident.get("lora", 0)
    if lora:
        yield Advice(
            "fewer_adapters",
            f"Keep fewer or smaller LoRA adapters on the GPU: their buffers take "
            f"{format_size(lora)}.",
            known.fewer_adapters,
        )


def _smaller_cache(engine: Engine, requested: int) -> Iterator[Advice]:
    """Yield a smaller KV cache: what fits by the peaks so far, or less by the failed request."""
    cache = engine.resident.get("kv_cache", 0)
    advised = engine.kv_cache_advice_bytes
    smaller = cache - requested - SPARE_BYTES
    size = smaller if advised is None else min(advised, smaller)
    if cache and size > 0:
        text = f"Leave more memory for activations: the KV cache has {format_size(cache)}."
        argument = arguments_of(engine.name).cache_bytes
        yield Advice("kv_cache", text, (argument.format(size),) if argument else ())


def waking(name: str, asleep: int | None) -> Iterator[Advice]:
    """Yield what lets an engine wake up; `asleep` is what it takes again, None if unknown."""
    known = arguments_of(name)
    sleeps = "" if asleep is None else f": {format_size(asleep)} of the engine is asleep"
    yield Advice(
        "before_wake_up",
        f"Return memory to the driver before wake_up{sleeps}. A trainer calls session.release() or "
        "empties its cache.",
        ("torch.cuda.empty_cache()", "torchmem_engine_wake_margin_bytes"),
    )
    yield Advice(
        "weights_first",
        "Wake the weights first, and the KV cache only when the weights are updated.",
        known.wake_in_turn,
    )
    yield Advice(
        "smaller_engine",
        "Give the engine less of the GPU. Restart it after a failed wake-up: it is half awake.",
        known.smaller_share,
    )
