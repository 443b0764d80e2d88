"""One reading of all GPUs: the collectors ask through it, and it keeps what one GPU's failure must not take away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import Metric

from torchmem.exporter.gpu import (
    GpuDownError,
    GpuIdentity,
    GpuLabels,
    Nvml,
    NvmlCallError,
    NvmlDownError,
)
from torchmem.exporter.values import ProcessMemory, Versions

_log = logging.getLogger(__name__)

T = TypeVar("T")


class AbandonedError(Exception):
    """The call that was waited for has returned at last, but another reading has taken this one's place."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one collector gave: its families, and its duration in seconds, None when it did not come to an end."""

    collector: str
    families: tuple[Metric, ...] = ()
    success: bool = False
    seconds: float | None = None


def attempt(collector: str, collect: Callable[[], Iterable[Metric]]) -> Outcome:
    """Run one collector; its failure is logged and becomes `success=False`.

    NvmlDownError and AbandonedError go through.
    """
    start = time.perf_counter()
    try:
        families = tuple(collect())
    except (NvmlDownError, AbandonedError):
        raise
    except Exception:  # noqa: BLE001 - one collector never fails the scrape; it is logged
        _log.exception("collector %s failed", collector)
        return Outcome(collector, seconds=time.perf_counter() - start)
    return Outcome(collector, families, success=True, seconds=time.perf_counter() - start)


@dataclass(slots=True)
class Reading:
    """The state of one reading, written by the driver's thread and read by the scrape when the deadline is over.

    `hung`: GPUs that are left alone, because a call on them in an earlier reading has not returned;
    `reason`: why NVML does not answer, empty when it does; `asked`: the GPU whose answer is being waited for;
    `collector`: the one that asks;
    `faulty`: whether a GPU gave an answer that nobody foresaw since this was last set to False;
    `processes`: those that are shown, by GPU, None when the lists were not read;
    `memory_of`: bytes by UUID of GPU or MIG device and pid; `mig`: the GPU of each MIG device by every
    name of the device; `mig_names`: those names by the device's UUID.
    """

    nvml: Nvml
    hung: frozenset[GpuLabels] = frozenset()
    reason: str = "timeout"
    present: tuple[GpuIdentity, ...] = ()
    lost: Mapping[GpuLabels, int | None] = field(default_factory=dict)
    asked: GpuLabels | None = None
    collector: str = "gpu"
    faulty: bool = False
    versions: Versions = field(default_factory=Versions)
    processes: Mapping[GpuLabels, tuple[int, ...]] | None = None
    memory_of: Mapping[tuple[str, int], ProcessMemory] = field(default_factory=dict)
    mig: Mapping[str, GpuIdentity] = field(default_factory=dict)
    mig_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_abandoned: bool = False

    @property
    def silent(self) -> frozenset[GpuLabels]:
        """GPUs that do not answer: lost, hung, or waited for just now."""
        asked = self.asked
        return frozenset({*self.lost, *self.hung, *([] if asked is None else [asked])})

    @contextmanager
    def asking(self, labels: GpuLabels) -> Iterator[None]:
        """Around every call on one GPU; raises AbandonedError when it took so long that nobody reads the answer."""
        self.asked = labels
        try:
            yield
        finally:
            with self._lock:
                self.asked = None
                if self._is_abandoned:
                    raise AbandonedError

    def abandon(self) -> GpuLabels | None:
        """End this reading when the call that it waits for returns: the GPU of that call, None if it waits for none."""
        with self._lock:
            self._is_abandoned = self.asked is not None
            return self.asked

    def each(self, ask: Callable[[str], T | None]) -> list[tuple[GpuIdentity, T]]:
        """Ask every GPU that still answers; unknown values are left out, a GPU that fails is lost from here on."""
        asked = ((gpu, self._ask(gpu, ask)) for gpu in self.present if gpu.labels not in self.lost)
        return [(gpu, answer) for gpu, answer in asked if answer is not None]

    def _ask(self, gpu: GpuIdentity, ask: Callable[[str], T | None]) -> T | None:
        try:
            with self.asking(gpu.labels):
                return ask(gpu.uuid)
        except (NvmlDownError, AbandonedError):
            raise
        except GpuDownError as error:
            self.lost = {**self.lost, gpu.labels: error.code}
        except NvmlCallError:
            self.faulty = True
        except Exception:  # noqa: BLE001 - one GPU never takes another's values away; it is logged
            _log.exception("GPU %d gave an answer that could not be read", gpu.index)
            self.faulty = True
        return None
