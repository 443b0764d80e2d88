"""CPU time of counting the parameters of modules, by the number of modules.

    python -m torchmem.phantom --memory 80GiB -- python -m benchmarks.overhead.modules

Each module is a linear layer with a weight and a bias. "Registration" is the time that the SDK's
hook adds to the registration of a parameter or submodule. Needs PyTorch with a GPU or the phantom.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any, cast

from benchmarks.overhead.components import (
    PAUSE_SECONDS,
    WithoutCounter,
    added,
    cpu_seconds,
    has_components,
)
from benchmarks.overhead.report import microseconds, rows_of, table

from torchmem.allocator.backend import Backend
from torchmem.sdk.pytorch.seen_modules import SeenModules
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import INTERVAL_SECONDS, MODULES_AFTER_SECONDS

MODULES = (100, 1_000, 10_000)


def layers(number: int) -> Any:
    """Return a container of this many small linear layers."""
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(4, 4, device="cuda") for _ in range(number)])


def registration(model: Any) -> float:
    """Return the CPU seconds of the hook, for modules that it has not seen."""
    import torch

    modules = list(model)

    def see_all() -> None:
        seen = SeenModules(torch.nn.Module)
        for module in modules:
            seen.see(module)

    return min(cpu_seconds(see_all) for _ in range(5)) / len(modules)


def row(number: int) -> list[str]:
    """Return one row of the table."""
    from torchmem.sdk.pytorch.backend import TorchBackend

    backend = TorchBackend()
    model = layers(number)
    gc.collect()
    gc.freeze()  # a collection of all these objects is not the SDK's
    recorder = Recorder(backend)
    without = Recorder(cast("Backend", WithoutCounter(backend)))
    recorder.read_stats()
    time.sleep(MODULES_AFTER_SECONDS)
    spent = []
    while not has_components(recorder):
        spent.append(cpu_seconds(recorder.read_stats, INTERVAL_SECONDS))
    return [
        f"{len(model):,}",
        microseconds(registration(model)),
        microseconds(sum(spent)),
        f"{len(spent):,}",
        microseconds(max(spent)),
        microseconds(added(recorder, without, 0.0, "idle")),
        microseconds(added(recorder, without, PAUSE_SECONDS, "idle")),
    ]


def main(*arguments: str) -> None:
    """Print a table; each row comes from a process of its own."""
    if arguments[:1] == ("row",):
        print("\t".join(row(int(arguments[1]))))
        return
    head = ("modules", "registration", "count", "in reads", "longest", "read", "after a pause")
    numbers = arguments or map(str, MODULES)
    print(table(head, rows_of("benchmarks.overhead.modules", numbers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
