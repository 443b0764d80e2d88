"""The row of the dashboard "Training memory" on inference engines."""

from __future__ import annotations

from dashboards import colors as levels
from dashboards import recorded
from dashboards.panels import ASLEEP_TITLE, Panel, Query, Unit, areas_only, lines, pale, rank_lines
from dashboards.queries import append_matcher, live, of_ranks, rate, select

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.memory_parts import COMPONENTS, PARTS


def _resident(matcher: str) -> str:
    """Return the bytes of parts on the GPU; 0 while they sleep."""
    parts = append_matcher(select(catalog.ENGINE_MEMORY), matcher)
    there = append_matcher(parts, 'state="resident"')
    return f"sum({live(there)}) or 0 * sum({live(parts)})"


def _of_model(spec: MetricSpec) -> str:
    return f'{spec.name}{{model_name=~"$run"}}'


def _gigabytes(spec: MetricSpec) -> str:
    """Return the sum in bytes; SGLang divides by 2^30 (utils/common.py)."""
    return f"sum({_of_model(spec)}) * 2^30"


_PARTS = {
    "weights": ("weights", COMPONENTS["parameters"].color, recorded.SGLANG_WEIGHTS),
    "kv_cache": ("KV cache", COMPONENTS["held"].color, recorded.SGLANG_CACHE),
    "lora": ("LoRA adapters", COMPONENTS["optimizer_state"].color, None),
    "cudagraph": ("CUDA graphs", PARTS["private_pools"].color, recorded.SGLANG_GRAPHS),
}
"""The engine's parts: their name, their color, and SGLang's own gauge of them."""


def _areas() -> list[Query]:
    """Return a query for each part that is on the GPU, the others together, and what sleeps."""
    areas = []
    for part, (name, color, gauge) in _PARTS.items():
        there = _resident(f'part="{part}"')
        expr = f"{there} or {_gigabytes(gauge)}" if gauge else there
        areas.append(Query(expr, name, color))
    others = _resident(f'part!~"{"|".join(_PARTS)}"')
    asleep = f"sum({live(select(catalog.ENGINE_MEMORY, state='asleep'))})"
    return [
        *areas,
        Query(others, "buffers and workspaces", COMPONENTS["step"].color),
        Query(asleep, ASLEEP_TITLE, PARTS["free"].color),
    ]


_AREAS = _areas()
_PLANNED, _PEAK, _ADVICE = (
    catalog.ENGINE_PLANNED,
    catalog.ENGINE_PEAK,
    catalog.ENGINE_KV_CACHE_ADVICE,
)

PANELS: list[Panel] = [
    pale(
        areas_only("What the engine holds", _AREAS, Unit.BYTES)
        .description(
            "How much memory do the weights, the KV cache, LoRA adapters, workspaces and CUDA "
            "graphs of the engines take, and how much of it have they given back to the driver "
            "while they sleep? SGLang's own values count if Prometheus scrapes SGLang."
        )
        .no_value("No inference engine")
        .height(10),
        len(_AREAS) - 1,
    ),
    lines(
        "KV cache in use",
        [
            Query(f"max by (model_name) ({_of_model(recorded.VLLM_USE)})", "{{model_name}}"),
            Query(
                f"max by (model_name) ({_of_model(recorded.SGLANG_USE)})", "{{model_name}}, SGLang"
            ),
        ],
        Unit.RATIO,
    )
    .description(
        "How much of the KV cache do requests use? If it is full, requests wait or are "
        "preempted; if it is never used, it is larger than needed. The engine itself says it, "
        "and Prometheus must scrape its /metrics; the model's name there is the run here."
    )
    .no_value("Prometheus does not scrape the engine's own /metrics")
    .height(10),
    lines(
        "Planned and actual",
        [
            Query(f"max({live(select(_PLANNED, part='activations'))})", "activations, planned"),
            Query(f"max({live(select(_PEAK, part='activations'))})", "activations, peak"),
            Query(f"min({live(select(_PLANNED, part='kv_cache'))})", "KV cache"),
            Query(f"min({live(select(_ADVICE))})", "KV cache that fits"),
        ],
        Unit.BYTES,
    )
    .description(
        "Was the plan right? vLLM sizes its KV cache by a profile run with the largest batch. "
        "The actual peak of the activations is mostly lower, and then the KV cache can be "
        "larger: start vLLM with --kv-cache-memory= and the size that fits. If that is "
        "smaller than the KV cache, real requests need more than the plan."
    )
    .no_value("The engine has not said what it planned")
    .height(10),
    rank_lines(
        "Free beyond what wakes up",
        of_ranks(select(catalog.ENGINE_WAKE_MARGIN), "min"),
        Unit.BYTES,
        lowest=True,
        mark=levels.WAKE_MARGIN,
    )
    .description(
        "Could a sleeping engine wake up now? Free memory of the GPU minus what the engine "
        "takes again. Below zero, waking it up fails with an out-of-memory error."
    )
    .no_value("No engine sleeps"),
    rank_lines("Left after a sleep", of_ranks(select(catalog.ENGINE_SLEEP_RESIDUAL)), Unit.BYTES)
    .description(
        "What does PyTorch keep on the GPU when the engine goes to sleep? In reinforcement "
        "learning the engine sleeps in every step: if this grows, the trainer runs out of memory."
    )
    .no_value("No engine has slept"),
    lines(
        "Sleeps and preemptions",
        [
            Query(f"60 * max({rate(select(catalog.ENGINE_SLEEPS))})", "sleeps"),
            Query(f"60 * sum({rate(_of_model(recorded.VLLM_PREEMPTIONS))})", "preemptions"),
        ],
        Unit.PER_MINUTE,
    )
    .description(
        "How often does an engine sleep, and how often does vLLM preempt a request because the "
        "KV cache is full? The ranks of one engine sleep together and count once."
    )
    .no_value("No engine has slept")
    .height(10),
]
