"""The row of the dashboard "Training memory" on inference engines."""

from __future__ import annotations

from dashboards import recorded
from dashboards.panels import Panel, Query, Text, Unit, lines, rank_lines
from dashboards.queries import live, of_ranks, rate, select

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec


def _sum(spec: MetricSpec, by: str, **matchers: str) -> str:
    return f"sum by ({by}) ({live(select(spec, **matchers))})"


def _of_model(spec: MetricSpec) -> str:
    return f'{spec.name}{{model_name=~"$run"}}'


def _gigabytes(spec: MetricSpec) -> str:
    """Return the sum in bytes; SGLang divides by 2^30 (utils/common.py)."""
    return f"sum({_of_model(spec)}) * 2^30"


_PLANNED, _PEAK, _ADVICE = (
    catalog.ENGINE_PLANNED,
    catalog.ENGINE_PEAK,
    catalog.ENGINE_KV_CACHE_ADVICE,
)

PANELS: list[Panel] = [
    lines(
        Text(
            "What the engine holds",
            "How much memory do the weights, the KV cache, LoRA adapters, workspaces and CUDA "
            "graphs of the engines take, and how much of it have they given back to the driver "
            "while they sleep? SGLang's own values are shown too, if Prometheus scrapes SGLang.",
            "No inference engine",
        ),
        [
            Query(_sum(catalog.ENGINE_MEMORY, "part, state"), "{{part}}, {{state}}"),
            Query(_gigabytes(recorded.SGLANG_WEIGHTS), "weights, by SGLang"),
            Query(_gigabytes(recorded.SGLANG_CACHE), "kv_cache, by SGLang"),
            Query(_gigabytes(recorded.SGLANG_GRAPHS), "graphs, by SGLang"),
        ],
        Unit.BYTES,
    ).height(10),
    lines(
        Text(
            "KV cache in use",
            "How much of the KV cache do requests use? If it is full, requests wait or are "
            "preempted; if it is never used, it is larger than needed. The engine itself says it, "
            "and Prometheus must scrape its /metrics; the model's name there is the run here.",
            "Prometheus does not scrape the engine's own /metrics",
        ),
        [
            Query(f"max by (model_name) ({_of_model(recorded.VLLM_USE)})", "{{model_name}}"),
            Query(
                f"max by (model_name) ({_of_model(recorded.SGLANG_USE)})", "{{model_name}}, SGLang"
            ),
        ],
        Unit.RATIO,
    ).height(10),
    lines(
        Text(
            "Planned and actual",
            "Was the plan right? vLLM sizes its KV cache by a profile run with the largest batch. "
            "The actual peak of the activations is mostly lower, and then the KV cache can be "
            "larger: start vLLM with --kv-cache-memory= and the size that fits. If that is "
            "smaller than the KV cache, real requests need more than the plan.",
            "The engine has not said what it planned",
        ),
        [
            Query(f"max({live(select(_PLANNED, part='activations'))})", "activations, planned"),
            Query(f"max({live(select(_PEAK, part='activations'))})", "activations, peak"),
            Query(f"min({live(select(_PLANNED, part='kv_cache'))})", "KV cache"),
            Query(f"min({live(select(_ADVICE))})", "KV cache that fits"),
        ],
        Unit.BYTES,
    ).height(10),
    rank_lines(
        Text(
            "Free beyond what wakes up",
            "Could a sleeping engine wake up now? Free memory of the GPU minus what the engine "
            "takes again. Below zero, waking it up fails with an out-of-memory error.",
            "No engine sleeps",
        ),
        of_ranks(select(catalog.ENGINE_WAKE_MARGIN), "min"),
        Unit.BYTES,
        lowest=True,
    ),
    rank_lines(
        Text(
            "Left after a sleep",
            "What does PyTorch keep on the GPU when the engine goes to sleep? In reinforcement "
            "learning the engine sleeps in every step: if this grows, the trainer runs out of "
            "memory.",
            "No engine has slept",
        ),
        of_ranks(select(catalog.ENGINE_SLEEP_RESIDUAL)),
        Unit.BYTES,
    ),
    lines(
        Text(
            "Sleeps and preemptions",
            "How often do the engines sleep, and how often does vLLM preempt a request because the "
            "KV cache is full?",
            "No engine has slept",
        ),
        [
            Query(f"60 * sum({rate(select(catalog.ENGINE_SLEEPS))})", "sleeps"),
            Query(f"60 * sum({rate(_of_model(recorded.VLLM_PREEMPTIONS))})", "preemptions"),
        ],
        Unit.PER_MINUTE,
    ).height(10),
]
