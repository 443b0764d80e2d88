"""What to type to change an inference engine, by the engine's name.

Reports are also read on machines without the engine, so the table is here and not in the engine's
integration. It is not in the samples either, because users type these lines, and a sample may come
from another user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The lines for each change; {} stands for bytes. Nothing of an engine that is not known."""

    cache_bytes: str = ""
    smaller_batches: tuple[str, ...] = ()
    fewer_graphs: tuple[str, ...] = ()
    fewer_adapters: tuple[str, ...] = ()
    wake_in_turn: tuple[str, ...] = ()
    smaller_share: tuple[str, ...] = ()


ARGUMENTS: Mapping[str, EngineArguments] = {
    # vLLM 0.33, vllm/engine/arg_utils.py
    "vllm": EngineArguments(
        cache_bytes="--kv-cache-memory={}",
        smaller_batches=("--max-num-seqs=128", "--max-num-batched-tokens=2048"),
        fewer_graphs=("--max-cudagraph-capture-size=64", "--enforce-eager"),
        fewer_adapters=("--max-loras=1", "--max-lora-rank=16"),
        wake_in_turn=('wake_up(tags=["weights"])', 'wake_up(tags=["kv_cache"])'),
        smaller_share=("--gpu-memory-utilization=0.5",),
    ),
}


def arguments_of(engine: str) -> EngineArguments:
    """Return the arguments of an engine; all are empty for an unknown one."""
    return ARGUMENTS.get(engine, EngineArguments())
