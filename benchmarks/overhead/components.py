"""What counting the components costs: CPU time with and without it, by the number of parameters.

    python -m torchmem.phantom --memory 80GiB -- python -m benchmarks.overhead.components

Usage: `python -m benchmarks.overhead.components 1000 10000`. Each figure comes from a process of
its own, which sleeps between its steps, one per second. Its optimizer has gradients and two states
for each parameter and does no work, but calls PyTorch's hooks. Needs PyTorch with a GPU or the
phantom.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any, cast

from benchmarks.overhead.report import microseconds, percent, table

PARAMETERS = (1_000, 10_000, 100_000)
SECONDS = 60.0
MAX_WARM_UP_SECONDS = 600.0


def optimizer(parameters: int) -> Any:
    """Return an optimizer of this many small parameters, whose step does nothing."""
    import torch

    class Idle(torch.optim.Optimizer):  # type: ignore[misc]  # torch is skipped
        def step(self, closure: Any = None) -> None:
            pass

    made = [torch.nn.Parameter(torch.empty(64, device="cuda")) for _ in range(parameters)]
    idle = Idle(made, {})
    for parameter in made:
        parameter.grad = torch.empty_like(parameter)
        idle.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.empty_like(parameter),
            "exp_avg_sq": torch.empty_like(parameter),
        }
    return idle


class WithoutCounter:
    """PyTorch's allocator, of whose tensors nothing is known."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def tensor_counter(self) -> None:
        """Return None, so that there are no components."""


def measure(parameters: int, *, counted: bool) -> dict[str, float]:
    """Measure one process: CPU time until all is counted, and then in SECONDS."""
    from torchmem import sdk
    from torchmem.allocator.backend import Backend
    from torchmem.sdk.torch_backend import TorchBackend

    backend = TorchBackend()
    used = backend if counted else cast("Backend", WithoutCounter(backend))
    idle = optimizer(parameters)
    sdk.instrument(
        backend=used, run_dir=tempfile.mkdtemp(prefix="torchmem-"), snapshot_interval=3600.0
    )
    steps: list[float] = []
    started = time.monotonic()
    while time.monotonic() - started < warm_up_seconds(parameters):
        steps.append(step(idle))
    warm_up = time.monotonic() - started
    cpu, wall = time.process_time(), time.monotonic()
    steady = [step(idle) for _ in range(int(SECONDS))]
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {
        "warm_up_wall": warm_up,
        "warm_up_cpu": sum(steps),
        "longest": max(steps),
        "step": sum(steady) / len(steady),
        "cpu": cpu / wall,
    }


def warm_up_seconds(parameters: int) -> float:
    """Return a time in which a count of all tensors is complete."""
    return min(MAX_WARM_UP_SECONDS, 15 + parameters / 250)


def step(idle: Any) -> float:
    """Sleep, step, and return the CPU seconds of the step with its hooks."""
    time.sleep(1.0)
    started = time.thread_time()
    idle.step()
    return time.thread_time() - started


def child(parameters: int, counted: int) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "child", str(parameters), str(counted)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return cast("dict[str, float]", json.loads(done.stdout.splitlines()[-1]))


def row(parameters: int) -> list[str]:
    """Return one row of the table: the process with components minus that without."""
    with_it, without = child(parameters, 1), child(parameters, 0)
    return [
        f"{parameters:,}",
        microseconds(with_it["warm_up_cpu"] - without["warm_up_cpu"]),
        microseconds(with_it["longest"]),
        microseconds(with_it["step"] - without["step"]),
        percent(with_it["cpu"] - without["cpu"]),
    ]


def main(*arguments: str) -> None:
    """Print a table, or the figures of one process."""
    if arguments[:1] == ("child",):
        print(json.dumps(measure(int(arguments[1]), counted=arguments[2] == "1")))
        return
    head = ("parameters", "first count", "longest step of it", "read at a step", "of a core")
    print(table(head, [row(number) for number in map(int, arguments or PARAMETERS)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
