"""Instructions that a step without a read adds to the training thread, by callgrind.

    python -m benchmarks.overhead.step_instructions      # needs valgrind; two minutes

An empty loop, one with `session.step()`, and one with the hooks around an optimizer's step. The
allocator is simulated, because a step without a read does not call it.
"""

from __future__ import annotations

from benchmarks.instructions import count

TIMES = 3000
PREPARE = """
import tempfile
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

class Backend(SimulatedBackend):
    def on_step_begin(self, callback):
        self.before = callback
        return lambda: None

    def on_step(self, callback):
        self.after = callback
        return lambda: None

class Optimizer:
    param_groups, state = [], {}

backend, optimizer = Backend([DeviceCachingAllocator(SimulatedGpu())]), Optimizer()
settings = resolve({"interval": 3600.0, "run_dir": tempfile.mkdtemp()}, {})
session = Session(settings, backend, {})

def nothing():
    pass

def hooks():
    backend.before(optimizer, False)
    backend.after(optimizer)

for _ in range(200):
    CALL()
for _ in range(TIMES):
    CALL()
"""
CALLS = {"nothing": "nothing", "session.step()": "session.step", "hooks": "hooks"}


def main() -> None:
    """Print one line for each."""
    for name, call in CALLS.items():
        print(f"{name:<16}{count(PREPARE.replace('CALL', call), TIMES):10,.0f} instructions")


if __name__ == "__main__":
    main()
