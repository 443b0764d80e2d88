"""The demo's ranks: one instrumented process each, which trains by a scenario."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from torchmem import sdk
from torchmem.demo.gpus import EVENTS_PER_STEP, STEP_SECONDS, RankGpu, SharedGpus
from torchmem.demo.node import cuda_bytes, product_name, uuid
from torchmem.sample.run_directory import ENVIRONMENT_VARIABLE
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend, SimulatedOptimizer
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.scenarios import SCENARIOS, ScenarioEvent, SimulatedRank

GRACE_SECONDS = 5.0
# Below nohup, the demo outlives its terminal.
_HANGUP = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, *_HANGUP)


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What to run; `duration` is for how long (s) on a machine that keeps up with the ranks."""

    scenario: str
    ranks: int
    duration: float
    seed: int
    loop: bool = False

    @property
    def steps(self) -> int:
        """Return how many optimizer steps fit into the duration."""
        return max(1, round(self.duration / STEP_SECONDS))

    def simulated(
        self, rank: int, allocator: DeviceCachingAllocator, capacity: int
    ) -> SimulatedRank:
        """Return one simulated rank, with `capacity` bytes of memory."""
        return SimulatedRank(allocator, rank, self.ranks, self.steps, self.seed, capacity)

    def train(
        self, simulated: SimulatedRank, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[ScenarioEvent]:
        """Yield the events of one rank's training, at the pace of a GPU.

        It ends when the duration is over and all steps are done, so that a busy machine, which
        needs longer, shows the whole scenario too. `clock` is in seconds.
        """
        until, steps = clock() + self.duration, 0
        for event in SCENARIOS[self.scenario].train(simulated):
            time.sleep(STEP_SECONDS / EVENTS_PER_STEP)
            yield event
            steps += event == "step"
            if steps > self.steps and clock() >= until:
                break


def simulated_rank(plan: DemoPlan, rank: int, folder: Path, shared: RankGpu) -> None:
    """Train in one process. Only the allocator is simulated; the SDK is the real one."""
    prepare(plan, rank, folder)
    scenario = SCENARIOS[plan.scenario]
    gpu = SimulatedGpu(
        cuda_bytes(scenario.gpu_bytes),
        use=shared.use,
        uuid=uuid(rank),
        name=product_name(scenario.gpu_bytes),
    )
    allocator = DeviceCachingAllocator(gpu)
    backend = SimulatedBackend([allocator])
    # Five times the default, because the simulator takes far longer than PyTorch for a snapshot.
    sdk.instrument(backend=backend, run=f"demo-{plan.scenario}", snapshot_budget=0.003)
    simulated = plan.simulated(rank, allocator, gpu.mem_get_info()[0])
    optimizer = SimulatedOptimizer(simulated.weights)
    try:
        for event in plan.train(simulated):
            shared.count_event()
            if event == "step":
                backend.step(optimizer)
    except OutOfMemoryError as error:
        sys.exit(f"OutOfMemoryError: {error}")


Target = Callable[[DemoPlan, int, Path, RankGpu], None]
"""The main function of a rank's process: plan, rank, folder of the demo, the rank's GPU."""


class RankProcesses:
    """The rank processes of a demo. `folder` holds their run directory and their output."""

    def __init__(self, plan: DemoPlan, folder: Path, target: Target = simulated_rank) -> None:
        self.gpus = SharedGpus(
            SCENARIOS[plan.scenario], plan.ranks, get_context("spawn"), plan.seed
        )
        self._plan = plan
        self._folder = folder
        self._target = target
        self._processes: dict[int, BaseProcess] = {}

    def start(self) -> None:
        """Start every rank; after `close`, start them again."""
        (self._folder / "run").mkdir(exist_ok=True)
        self.gpus.clear()
        for rank in range(self._plan.ranks):
            arguments = (self._plan, rank, self._folder, self.gpus.use(rank))
            process = get_context("spawn").Process(target=self._target, args=arguments, daemon=True)
            log_path(self._folder, rank).write_bytes(b"")
            process.start()
            self._processes[rank] = process
            self.gpus.pids[rank] = process.pid or 0

    def alive(self) -> bool:
        """Return whether any rank still trains; free the memory of ended ranks."""
        ended = [rank for rank, process in self._processes.items() if not process.is_alive()]
        for rank in ended:
            self.gpus.release(rank)
        return len(ended) < len(self._processes)

    def close(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Terminate every rank, and kill those that still run after `grace_seconds`."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + grace_seconds
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.alive()

    def last_lines(self) -> dict[int, str]:
        """Return the last line of each rank's output, by rank; a rank without output is absent."""
        texts = {rank: log_path(self._folder, rank).read_text().strip() for rank in self._processes}
        return {rank: text.splitlines()[-1] for rank, text in texts.items() if text}


def log_path(folder: Path, rank: int) -> Path:
    """Return the file for a rank's output, which would otherwise garble the screen."""
    return folder / f"rank{rank}.log"


def prepare(plan: DemoPlan, rank: int, folder: Path) -> None:
    """Set up environment, output and signals of a rank's process, as a launcher does."""
    output = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Ctrl-C reaches the whole process group, but the demo itself ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The demo blocks these signals before it starts its ranks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        ENVIRONMENT_VARIABLE: str(folder / "run"),
    }
