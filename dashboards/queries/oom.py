"""What is known of ranks that ran out of memory, also after the exporter has dropped them: "After an OOM"."""

from __future__ import annotations

from dashboards.queries import recorded
from dashboards.queries.select import (
    DEVICE_ROW,
    GPU_ROW,
    PROCESS,
    RANK_ROW,
    among,
    rate,
    row,
    select,
)

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec

STATES = ("running", "stalled", "exited", "oom", "killed")


def ooms() -> str:
    """OutOfMemoryErrors of every process seen in the dashboard's time range."""
    return f"sum(max_over_time({select(catalog.OOMS, over='$__range')}))"


def ooms_by_cause() -> str:
    """The same by cause, where there were any."""
    return f"sum by (cause) (max_over_time({select(catalog.OOMS, over='$__range')})) > 0"


def ended(state: str) -> str:
    """Processes that ended so."""
    return f"count({_seen(catalog.PROCESS_STATE, state=state)} == 1) or vector(0)"


def newest() -> str:
    """When the newest OOM was, in milliseconds since 1970."""
    return f"1000 * max({_seen(catalog.LAST_OOM_TIMESTAMP)})"


def _seen(spec: MetricSpec, **fixed: str) -> str:
    return f"last_over_time({select(spec, over='$__range', **fixed)})"


def _state(states: str) -> str:
    state = _seen(catalog.PROCESS_STATE).replace("}", f', state=~"{states}"}}')
    devices = f"{_seen(catalog.RESERVED_PEAK)} * 0"
    joined = f"{devices} + on ({', '.join(PROCESS)}) group_left (state) ({state} == 1)"
    return row(DEVICE_ROW, joined, "state")


def _failed() -> str:
    """Processes and devices with an OOM, or that were killed."""
    killed = row(DEVICE_ROW, _state("oom|killed"))
    return f"({row(DEVICE_ROW, _seen(catalog.LAST_OOM_TIMESTAMP))} or {killed})"


def _column(expression: str, *more: str) -> str:
    return among(DEVICE_ROW, row(DEVICE_ROW, expression, *more), _failed())


def state() -> str:
    """Last known state, as a label."""
    return among(DEVICE_ROW, _state(".*"), _failed())


def time() -> str:
    """When, in milliseconds since 1970."""
    return row(DEVICE_ROW, f"1000 * {_seen(catalog.LAST_OOM_TIMESTAMP)}")


def requested() -> str:
    """Bytes that the newest OOM asked for."""
    return row(DEVICE_ROW, _seen(catalog.LAST_OOM_REQUESTED))


def cause() -> str:
    """The most frequent cause, as the labels `cause` and `remedy`."""
    found = row(DEVICE_ROW, f"{_seen(catalog.OOMS)} > 0", "cause")
    return f'label_join(topk by ({", ".join(DEVICE_ROW)}) (1, {found}), "remedy", "", "cause")'


def last(spec: MetricSpec, **fixed: str) -> str:
    """The last value of a metric of the processes that failed."""
    return _column(_seen(spec, **fixed))


def last_reserved() -> str:
    """Bytes held from the driver, at last."""
    return _column(f"sum without (pool) ({_seen(catalog.RESERVED)})")


def last_free() -> str:
    """Cached free bytes, at last: releasable and stranded."""
    return _column(f"sum without (state) ({_seen(catalog.FREE)})")


def settings(*names: str) -> str:
    """Allocator settings of the processes that failed, as the labels `names`."""
    failed = f"{_seen(catalog.ALLOCATOR_INFO)} and on ({', '.join(PROCESS)}) {_at_last(PROCESS)}"
    return row(RANK_ROW, failed, *names)


def _at_last(labels: tuple[str, ...]) -> str:
    """Who failed within the time range, the same at each moment of it: the lines before an OOM are what matters."""
    newest = f"last_over_time({select(catalog.LAST_OOM_TIMESTAMP, over='$__range')} @ end())"
    return f"max by ({', '.join(labels)}) ({newest})"


def of_failed(expression: str) -> str:
    """Lines of the processes that ran out of memory, from before it on."""
    return f"{expression} and on ({', '.join(PROCESS)}) {_at_last(PROCESS)}"


def reserved() -> str:
    """Bytes held from the driver."""
    return of_failed(f"sum without (pool) ({select(catalog.RESERVED)})")


def allocated() -> str:
    """Bytes handed out to tensors."""
    return of_failed(f"sum without (pool) ({select(catalog.ALLOCATED)})")


def headroom() -> str:
    """Largest allocation that would succeed, with the allocator's retry flush."""
    return of_failed(select(catalog.HEADROOM, flush="true"))


def request() -> str:
    """What the newest OOM asked for."""
    return of_failed(select(catalog.LAST_OOM_REQUESTED))


def stranded() -> str:
    """Stranded bytes."""
    return of_failed(select(catalog.FREE, state="stranded"))


def retries() -> str:
    """Allocator retries per minute."""
    return of_failed(f"60 * {rate(select(catalog.ALLOC_RETRIES))}")


def part(name: str) -> str:
    """One part of the memory of the GPUs on which a rank ran out of it."""
    return (
        f"sum({select(recorded.PART, part=name)} and on ({', '.join(GPU_ROW)}) {_at_last(GPU_ROW)})"
    )


def total() -> str:
    """Memory of those GPUs."""
    return f"sum({select(recorded.TOTAL)} and on ({', '.join(GPU_ROW)}) {_at_last(GPU_ROW)})"


def states() -> str:
    """The state of each process as a number: its place in STATES."""
    numbered = (
        f"{index} * ({select(catalog.PROCESS_STATE, state=name)} == 1)"
        for index, name in enumerate(STATES)
    )
    return f"max without (state) ({' or '.join(numbered)})"
