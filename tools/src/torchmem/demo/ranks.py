"""The demo's ranks: one process for each, training by a scenario, instrumented as any script would be."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path

from torchmem import sdk
from torchmem.demo.cards import Cards, card_name, cuda_bytes, uuid
from torchmem.sample.run_directory import ENVIRONMENT_VARIABLE
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.card import CardUse, SimulatedCard
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.scenarios import SCENARIOS, ScenarioEvent, Worker

STEP_SECONDS = 0.2
MOMENTS_PER_STEP = 4
END_SECONDS = 5.0
ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played: a scenario's name, the number of ranks, seconds, seed, and whether on real GPUs."""

    scenario: str
    ranks: int
    duration: float
    seed: int
    real: bool = False
    loop: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps that fit into the duration."""
        return max(1, round(self.duration / STEP_SECONDS))

    def train(
        self, rank: int, allocator: DeviceCachingAllocator, capacity: int
    ) -> Iterator[ScenarioEvent]:
        """The moments of one rank's training in `capacity` bytes, paced like a GPU at work."""
        worker = Worker(allocator, rank, self.ranks, self.steps, self.seed, capacity)
        for moment in SCENARIOS[self.scenario].train(worker):
            time.sleep(STEP_SECONDS / MOMENTS_PER_STEP)
            yield moment


class Ranks:
    """All rank processes of a demo."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.cards = Cards(SCENARIOS[plan.scenario], plan.ranks, get_context("spawn"))
        self._processes: dict[int, SpawnProcess] = {}

    def start(self) -> None:
        """Start every rank; again after `close` for another round."""
        (self.folder / "run").mkdir(exist_ok=True)
        self.cards.clear()
        for rank in range(self.plan.ranks):
            process = self._process(rank)
            log_path(self.folder, rank).write_bytes(b"")
            process.start()
            self._processes[rank] = process
            self.cards.pids[rank] = process.pid or 0

    def _process(self, rank: int) -> SpawnProcess:
        context = get_context("spawn")
        if not self.plan.real:
            arguments = (self.plan, rank, self.folder, self.cards.use(rank))
            return context.Process(target=simulated_rank, args=arguments, daemon=True)
        from torchmem.demo.real import real_rank

        return context.Process(target=real_rank, args=(self.plan, rank, self.folder), daemon=True)

    def alive(self) -> bool:
        """Whether any rank still trains; a rank that has ended gives its memory back to its card."""
        ended = [rank for rank, process in self._processes.items() if not process.is_alive()]
        for rank in ended:
            self.cards.release(rank)
        return len(ended) < len(self._processes)

    def close(self) -> None:
        """End every rank that still runs."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.alive()

    @property
    def pids(self) -> list[int]:
        """Process ids of this round's ranks."""
        return list(self.cards.pids.values())

    def last_words(self) -> dict[int, str]:
        """The last line that each rank printed, of those that printed any."""
        texts = {rank: log_path(self.folder, rank).read_text().strip() for rank in self._processes}
        return {rank: text.splitlines()[-1] for rank, text in texts.items() if text}


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank prints to: its traceback must not break the screen."""
    return folder / f"rank{rank}.log"


def simulated_rank(plan: Plan, rank: int, folder: Path, use: CardUse) -> None:
    """One rank's process: a simulated allocator in the place of PyTorch's, everything else as in real training."""
    prepare(plan, rank, folder)
    scenario = SCENARIOS[plan.scenario]
    card = SimulatedCard(cuda_bytes(scenario), use=use, uuid=uuid(rank), name=card_name(scenario))
    allocator = DeviceCachingAllocator(card)
    backend = SimulatedBackend([allocator])
    # Five times the default: the simulator, in Python, takes far longer for a snapshot than PyTorch does.
    sdk.instrument(backend=backend, run=f"demo-{plan.scenario}", snapshot_budget=0.003)
    try:
        for moment in plan.train(rank, allocator, card.mem_get_info()[0]):
            if moment == "step":
                backend.step()
    except OutOfMemoryError as error:
        sys.exit(f"OutOfMemoryError: {error}")


def prepare(plan: Plan, rank: int, folder: Path) -> None:
    """The surroundings that a launcher gives a rank: environment, output, signals."""
    output = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the demo ends its ranks itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # as the demo left them
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        ENVIRONMENT_VARIABLE: str(folder / "run"),
    }
