"""Words that many rules share, by the name under which the templates ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

PROCESS = ("instance", "rank", "pid", "run")
DEVICE = ("instance", "uuid", "rank", "pid", "run")
GPU = ("instance", "uuid")

# How a value is written, after the query gave it.
_FORMATS = {
    "bytes": "humanize1024 }}B",
    "share": "humanizePercentage }}",
    "count": 'printf "%.0f" }}',
    "decimals": 'printf "%.2f" }}',
    "duration": "humanizeDuration }}",
}

FIXED: Mapping[str, str] = {
    "live": "and on (job, instance, rank, pid, run) rank:torchmem_process_state:live",
    "rank": "{{ $labels.run }} rank {{ $labels.rank }}",
    "gpu": "{{ $labels.instance }} GPU {{ or $labels.gpu $labels.uuid }}",
    "Rank": "Rank {{ $labels.rank }} (pid {{ $labels.pid }}) of run {{ $labels.run }} on {{ $labels.instance }}",
    "Rank and GPU": (
        "Rank {{ $labels.rank }} (pid {{ $labels.pid }}) of run {{ $labels.run }}\n"
        "on GPU {{ or $labels.gpu $labels.uuid }} of {{ $labels.instance }}"
    ),
    "GPU": "GPU {{ or $labels.gpu $labels.uuid }} of {{ $labels.instance }} ({{ $labels.uuid }})",
    "remedy": (
        "Restart the run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        "(PYTORCH_ALLOC_CONF from PyTorch 2.10 on)."
    ),
}


def query(labels: tuple[str, ...], selector: str, form: str) -> str:
    """Text of an annotation: the value of another series of the same object; nothing where it has none.

    `selector` is a metric's name with or without matchers.
    """
    name, _, matchers = selector.rstrip("}").partition("{")
    wanted = ",".join([*([matchers] if matchers else []), *(f"{label}=%q" for label in labels)])
    arguments = " ".join(f"$labels.{label}" for label in labels)
    return (
        f"{{{{ with printf `{name}{{{wanted}}}`\n{arguments} | query }}}}\n{{{{- . | first | value | {_FORMATS[form]}"
        "{{ end }}"
    )


def dashboard(uid: str, labels: tuple[str, ...]) -> str:
    """Path of a dashboard with its variables set to what the alert is about."""
    chosen = "&".join(f"var-{_VARIABLES[label]}={{{{ $labels.{label} | urlquery }}}}" for label in labels)
    return f"/d/{uid}?{chosen}" if chosen else f"/d/{uid}"


# The dashboards' variables by the label they choose; see dashboards/queries.py.
_VARIABLES = {"run": "run", "instance": "node", "uuid": "gpu", "rank": "rank"}
LINKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "device": ("torchmem-training-memory", ("run", "instance", "uuid", "rank")),
    "process": ("torchmem-training-memory", ("run", "instance", "rank")),
    "oom": ("torchmem-oom", ("run", "instance", "rank")),
    "node": ("torchmem-node", ("instance", "uuid")),
    "self": ("torchmem-self", ("instance",)),
}

QUERIES: Mapping[str, Callable[[str, str], str]] = {
    "of device": lambda selector, form: query(DEVICE, selector, form),
    "of process": lambda selector, form: query(PROCESS, selector, form),
    "of gpu": lambda selector, form: query(GPU, selector, form),
}
