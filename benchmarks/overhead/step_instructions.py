"""Instructions of a step, a read and a tick, by callgrind.

    python -m benchmarks.overhead.step_instructions      # needs valgrind; four minutes

The allocator is simulated: what PyTorch's own calls cost is not included. An optimizer's step is
announced only if it is watched, so most steps call one hook. The last lines add up what a process
with steps of 5 ms, and one that only sleeps, execute per second at the default interval. Another
checkout is measured with its source roots in PYTHONPATH.
"""

from __future__ import annotations

from benchmarks.instructions import count

PREPARE = """
import tempfile
from torchmem.sdk.parts import build
from torchmem.sdk.session import Session
from torchmem.sdk.settings import resolve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

class Backend(SimulatedBackend):
    def before(self, optimizer, has_closure):
        pass

    def on_step_begin(self, callback):
        self.before = callback
        def remove():
            self.__dict__.pop("before", None)
        return remove

    def on_step(self, callback):
        self.after = callback
        return lambda: None

class Optimizer:
    param_groups, state = [], {}

allocator = DeviceCachingAllocator(SimulatedGpu())
backend, optimizer = Backend([allocator]), Optimizer()
kept = [allocator.malloc(1 << 20) for _ in range(64)]
settings = resolve({"interval": 3600.0, "run_dir": tempfile.mkdtemp()}, {})
monitors = []

def parts(context, monitor):
    monitors.append(monitor)
    return build(context, monitor)

session = Session(settings, backend, {}, parts)
(monitor,) = monitors
monitor._sampler.stop(10)

def nothing():
    pass

def hooks():
    backend.before(optimizer, False)
    backend.after(optimizer)

def tick():
    monitor._tick()

def news():
    session.step()
    monitor._tick()

def read():
    monitor.reader.next_read = 0.0
    session.step()

for _ in range(200):
    CALL()
for _ in range(TIMES):
    CALL()
"""
CALLS = {
    "nothing": ("nothing", 3000),
    "session.step()": ("session.step", 3000),
    "hooks of an optimizer's step": ("hooks", 3000),
    "tick without news": ("tick", 200),
    "tick with news": ("news", 200),
    "step with a read": ("read", 200),
}


def main() -> None:
    """Print one line for each."""
    counts: dict[str, float] = {}
    for name, (call, times) in CALLS.items():
        counts[name] = count(PREPARE.replace("CALL", call), times) - counts.get("nothing", 0)
        print(f"{name:<29}{counts[name]:12,.0f} instructions")
    read, news = counts["step with a read"], counts["tick with news"]
    busy = 200 * counts["hooks of an optimizer's step"] + read + news
    print(f"{'per second, steps of 5 ms':<29}{busy:12,.0f} instructions")
    idle = read + counts["tick without news"]
    print(f"{'per second, asleep':<29}{idle:12,.0f} instructions")


if __name__ == "__main__":
    main()
