"""One reading of all GPUs: the collectors ask through it, and it keeps what one GPU's failure must not take away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuDownError, GpuIdentity, GpuLabels, Nvml, NvmlDownError, ProcessMemory

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one collector gave: its families, and its duration in seconds, None when it did not come to an end."""

    collector: str
    families: tuple[Metric, ...] = ()
    success: bool = False
    seconds: float | None = None


def attempt(collector: str, collect: Callable[[], Iterable[Metric]]) -> Outcome:
    """Run one collector; its failure is logged and becomes `success=False`. NvmlDownError goes through."""
    start = time.perf_counter()
    try:
        families = tuple(collect())
    except NvmlDownError:
        raise
    except Exception:  # noqa: BLE001 - one collector never fails the scrape; it is logged
        _log.exception("collector %s failed", collector)
        return Outcome(collector, seconds=time.perf_counter() - start)
    return Outcome(collector, families, success=True, seconds=time.perf_counter() - start)


@dataclass(slots=True)
class Reading:
    """The state of one reading, written by the driver's thread and read by the scrape when the deadline is over.

    `reason`: why NVML does not answer, empty when it does; `asked`: the GPU whose answer is being waited for;
    `processes`: by GPU UUID and pid, None when the lists were not read.
    """

    nvml: Nvml
    reason: str = "timeout"
    present: tuple[GpuIdentity, ...] = ()
    lost: Mapping[GpuLabels, int | None] = field(default_factory=dict)
    asked: GpuIdentity | None = None
    processes: Mapping[tuple[str, int], ProcessMemory] | None = None
    outcomes: tuple[Outcome, ...] = ()

    def each(self, ask: Callable[[str], T | None]) -> list[tuple[GpuIdentity, T]]:
        """Ask every GPU that still answers; unknown values are left out, a GPU that fails is lost from here on."""
        answers = []
        for gpu in self.present:
            if gpu.labels in self.lost:
                continue
            self.asked = gpu
            try:
                answer = ask(gpu.uuid)
            except GpuDownError as error:
                self.lost = {**self.lost, gpu.labels: error.code}
                continue
            finally:
                self.asked = None
            if answer is not None:
                answers.append((gpu, answer))
        return answers
