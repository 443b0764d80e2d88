"""Selectors that follow the choices above a dashboard, and the choices' own queries."""

from __future__ import annotations

from collections.abc import Iterable

from dashboards.queries.recorded import LIVE

from torchmem.sample.catalog import CATALOG, GPU, PROCESS_STATE, RANK, MetricSpec

# Dashboard variables that narrow a query, by the label they apply to; `instance` is on every scraped series.
FILTERS = {"instance": "$node", "uuid": "$gpu", "run": "$run", "rank": "$rank"}

PROCESS = ("job", "instance", *RANK)
DEVICE_ROW = ("instance", *GPU, *RANK)
GPU_ROW = ("instance", *GPU)
RANK_ROW = ("run", "rank", "instance")
RUN_ROW = ("run",)


def select(spec: MetricSpec, suffix: str = "", over: str = "", **fixed: str) -> str:
    """A selector of one metric, narrowed by the dashboard's variables and by fixed label values; `over` a range."""
    labels = {*spec.labels, *(["instance"] if spec.name in CATALOG else [])}
    unknown = set(fixed) - labels
    if unknown:
        raise ValueError(f"{spec.name} has no label {', '.join(sorted(unknown))}")
    matchers = [f'{label}=~"{value}"' for label, value in FILTERS.items() if label in labels]
    matchers += [f'{label}="{value}"' for label, value in fixed.items()]
    return f"{spec.name}{suffix}{{{', '.join(matchers)}}}" + (f"[{over}]" if over else "")


def live(expression: str) -> str:
    """Only ranks that hold memory now; the exporter serves dead ones with their last values for a while."""
    return f"{expression} and on ({', '.join(PROCESS)}) {LIVE.name}"


def row(labels: Iterable[str], expression: str, *more: str) -> str:
    """One value for each row of a table, that is for each set of `labels`, and for labels that become columns."""
    return f"max by ({', '.join((*labels, *more))}) ({expression})"


def among(labels: Iterable[str], expression: str, rows: str) -> str:
    """Only those rows of a table that `rows` has."""
    return f"{expression} and on ({', '.join(labels)}) {rows}"


def seen(expression: str) -> str:
    """The newest value within the dashboard's time range, also of what is gone since."""
    return f"last_over_time({expression}[$__range])"


def rate(selector: str) -> str:
    """Per second, over what Grafana finds right for the panel's resolution."""
    return f"rate({selector}[$__rate_interval])"


def variable_values(spec: MetricSpec, label: str, *narrowed_by: str) -> str:
    """Grafana's query for the values of a label, narrowed by the variables to its left."""
    matchers = ", ".join(f'{name}=~"{FILTERS[name]}"' for name in narrowed_by)
    return f"label_values({spec.name}{f'{{{matchers}}}' if matchers else ''}, {label})"


def variable_gpus(spec: MetricSpec, *narrowed_by: str) -> str:
    """Grafana's query for GPUs: value is the UUID, text is node and index."""
    matchers = ", ".join(f'{name}=~"{FILTERS[name]}"' for name in narrowed_by)
    devices = f"max by (instance, gpu, uuid) (last_over_time({spec.name}{{{matchers}}}[$__range]))"
    return f'query_result(label_join({devices}, "where", " GPU ", "instance", "gpu"))'


def variable_runs_or_none() -> str:
    """Grafana's query for all runs and the word none."""
    none = 'label_replace(vector(0), "run", "none", "", "")'
    return f"query_result({none} or max by (run) (max_over_time({PROCESS_STATE.name}[$__range])))"
