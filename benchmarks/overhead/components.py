"""CPU time of counting the components, by the number of parameters.

    python -m torchmem.phantom --memory 80GiB -- python -m benchmarks.overhead.components

Usage: `python -m benchmarks.overhead.components 1000 10000`. Reads with and without components take
turns in one process. The optimizer has gradients and two states for each parameter; the recorded
step makes four allocations and frees for each. Needs PyTorch with a GPU or the phantom.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from benchmarks.overhead.report import microseconds, rows_of, table

from torchmem.allocator.backend import Backend
from torchmem.sdk.components.tracked import Moment
from torchmem.sdk.pytorch.backend import TorchBackend
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import INTERVAL_SECONDS

PARAMETERS = (1_000, 10_000, 100_000)
EVENTS_PER_PARAMETER = 8
PAIRS = 300
PAUSE_SECONDS = 0.01


def optimizer(parameters: int) -> Any:
    """Return an optimizer of this many small parameters, with gradients and states."""
    import torch

    made = [torch.nn.Parameter(torch.empty(64, device="cuda")) for _ in range(parameters)]
    adamw = torch.optim.AdamW(made)
    for parameter in made:
        parameter.grad = torch.empty_like(parameter)
        adamw.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.empty_like(parameter),
            "exp_avg_sq": torch.empty_like(parameter),
        }
    return adamw


class WithoutCounter:
    """PyTorch's allocator, without information about its tensors."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def tensor_counter(self) -> None:
        """Return None, so that there are no components."""


def cpu_seconds(call: Callable[[], object], pause: float = PAUSE_SECONDS) -> float:
    """Return the CPU seconds of this thread for one call; in the pause, caches get cold."""
    time.sleep(pause)
    started = time.thread_time()
    call()
    return time.thread_time() - started


def has_components(recorder: Recorder) -> bool:
    """Return whether the count is complete."""
    return any(device.components for device in recorder.samples())


def count(recorder: Recorder) -> list[float]:
    """Return the CPU seconds of each read until all tensors are counted."""
    spent = []
    while not has_components(recorder):
        spent.append(cpu_seconds(lambda: recorder.read_stats("step"), INTERVAL_SECONDS))
    return spent


def added(recorder: Recorder, without: Recorder, pause: float, moment: Moment = "step") -> float:
    """Return the CPU seconds that components add to a read: the median of pairs."""
    return statistics.median(
        cpu_seconds(lambda: recorder.read_stats(moment), pause)
        - cpu_seconds(lambda: without.read_stats(moment), pause)
        for _ in range(PAIRS)
    )


def record(recorder: Recorder, adamw: Any, parameters: int) -> float:
    """Return the CPU seconds of recording one step, without the step itself."""
    import torch

    def end() -> None:
        recorder.before_optimizer(adamw, has_closure=False)
        recorder.read_stats("step")

    spent = cpu_seconds(recorder.record_next_step)
    for _ in range(parameters * EVENTS_PER_PARAMETER // 2):
        torch.empty(64, device="cuda")
    return spent + cpu_seconds(end)


def row(parameters: int) -> list[str]:
    """Return one row of the table."""
    backend = TorchBackend()
    adamw = optimizer(parameters)
    gc.collect()
    gc.freeze()  # a collection of all these objects is not the SDK's
    recorder = Recorder(backend)
    without = Recorder(cast("Backend", WithoutCounter(backend)))
    recorder.components.see(adamw)
    first = count(recorder)
    return [
        f"{parameters:,}",
        microseconds(sum(first)),
        f"{len(first):,}",
        microseconds(max(first)),
        microseconds(added(recorder, without, 0.0)),
        microseconds(added(recorder, without, PAUSE_SECONDS)),
        microseconds(record(recorder, adamw, parameters)),
    ]


def main(*arguments: str) -> None:
    """Print a table; each row comes from a process of its own."""
    if arguments[:1] == ("row",):
        print("\t".join(row(int(arguments[1]))))
        return
    head = (
        "parameters",
        "first count",
        "in reads",
        "longest",
        "read",
        "after a pause",
        "recorded step",
    )
    numbers = arguments or map(str, PARAMETERS)
    print(table(head, rows_of("benchmarks.overhead.components", numbers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
