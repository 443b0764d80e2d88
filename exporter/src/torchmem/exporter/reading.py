"""One reading of all GPUs: a GPU that fails costs only its own values."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import TracebackType
from typing import Any, TypeVar

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuIdentity, GpuLabels, GpuValue, Nvml, Versions
from torchmem.exporter.nvml import GpuLostError, NvmlCallError, NvmlDownError
from torchmem.metrics.catalog import GPU, MetricSpec
from torchmem.metrics.families import keyed_family, value_family

_log = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V", bound=GpuValue)

DEFAULT_PROCESSES_PER_GPU = 32


class AbandonedError(Exception):
    """A late call returned after its reading was replaced by another one."""


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """The families of one collector; `seconds` is None if it did not finish."""

    collector: str
    families: tuple[Metric, ...] = ()
    success: bool = False
    seconds: float | None = None


def run_collector(name: str, collect: Callable[[], Iterable[Metric]]) -> CollectorResult:
    """Run one collector; a failure is logged and becomes `success=False`.

    Raises only NvmlDownError and AbandonedError.
    """
    start = time.perf_counter()
    try:
        families = tuple(collect())
    except (NvmlDownError, AbandonedError):
        raise
    except OSError as error:
        _log.warning("collector %s failed: %s", name, error)
        return CollectorResult(name, seconds=time.perf_counter() - start)
    except Exception:  # noqa: BLE001 - one collector never fails the scrape; it is logged
        _log.exception("collector %s failed", name)
        return CollectorResult(name, seconds=time.perf_counter() - start)
    return CollectorResult(name, families, success=True, seconds=time.perf_counter() - start)


def read_and_collect(
    name: str, read: Callable[[], T], families: Callable[[T], Iterable[Metric]], unread: T
) -> tuple[T, CollectorResult]:
    """Run one collector in two steps, and also return what it has read, or `unread`."""
    value = unread

    def collect() -> Iterable[Metric]:
        nonlocal value
        value = read()
        return families(value)

    result = run_collector(name, collect)
    return value, result


@dataclass(slots=True)
class Reading:
    """The state of one reading: the driver's thread writes it, the scrape reads it at the deadline.

    `hung`: GPUs with a call of an earlier reading that has not returned; they are skipped.
    `processes_per_gpu`: how many processes of a GPU have series of their own.
    `down_reason`: why NVML does not respond, empty if it does. `present`: GPUs that were
    identified; `lost`: labels and return code of those that do not respond. `current_gpu` and
    `collector`: what the call in progress is for. `call_failed`: whether a call failed in an
    unexpected way since this was last set to False. `results`: collectors that have finished.
    """

    nvml: Nvml
    hung: frozenset[GpuLabels] = frozenset()
    processes_per_gpu: int = DEFAULT_PROCESSES_PER_GPU
    down_reason: str = "timeout"
    present: tuple[GpuIdentity, ...] = ()
    lost: Mapping[GpuLabels, int | None] = field(default_factory=dict)
    current_gpu: GpuLabels | None = None
    collector: str = "gpu"
    call_failed: bool = False
    versions: Versions = field(default_factory=Versions)
    results: tuple[CollectorResult, ...] = ()
    _values: dict[type[GpuValue], list[tuple[GpuIdentity, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_abandoned: bool = False

    @property
    def unresponsive(self) -> frozenset[GpuLabels]:
        """GPUs that are lost, hung, or late with the call in progress."""
        current = self.current_gpu
        return frozenset({*self.lost, *self.hung, *([] if current is None else [current])})

    def calling(self, labels: GpuLabels) -> AbstractContextManager[None]:
        """Surround every call on one GPU; raise AbandonedError if the call returned too late."""
        return _Calling(self, labels)

    def end_call(self) -> None:
        """Note that the call in progress has returned; raise AbandonedError if it was too late."""
        with self._lock:
            self.current_gpu = None
            if self._is_abandoned:
                raise AbandonedError

    def abandon(self) -> GpuLabels | None:
        """Make the reading end when the call in progress returns.

        Returns the GPU of that call, None if the call is on NVML as a whole.
        """
        with self._lock:
            self._is_abandoned = self.current_gpu is not None
            return self.current_gpu

    def read(self, kind: type[V]) -> list[tuple[GpuLabels, V]]:
        """Read a value of every GPU that responds, with the GPU's labels; leave out unknown ones.

        A GPU that does not respond is lost for the rest of the reading.
        """
        values = self._values[kind] = []
        for gpu in self.present:
            value = None if gpu.labels in self.lost else self._read(kind, gpu)
            if value is not None:
                values.append((gpu, value))
        return [(gpu.labels, value) for gpu, value in values]

    def values(self, kind: type[V]) -> list[tuple[GpuIdentity, V]]:
        """Return the values of this type that have been read so far."""
        return list(self._values.get(kind, ()))

    def has_families(self, collector: str) -> bool:
        """Whether a collector has finished without an error."""
        return any(result.collector == collector and result.families for result in self.results)

    def _read(self, kind: type[V], gpu: GpuIdentity) -> V | None:
        try:
            with self.calling(gpu.labels):
                return self.nvml.read(kind, gpu.uuid)
        except (NvmlDownError, AbandonedError):
            raise
        except GpuLostError as error:
            self.lost = {**self.lost, gpu.labels: error.code}
        except NvmlCallError:
            self.call_failed = True
        except Exception:  # noqa: BLE001 - one GPU's failure costs only that GPU; it is logged
            _log.exception("GPU %d returned a value that could not be read", gpu.index)
            self.call_failed = True
        return None


class _Calling:
    """The context of one call. As a class, because a generator costs as much as a call."""

    __slots__ = ("_labels", "_reading")

    def __init__(self, reading: Reading, labels: GpuLabels) -> None:
        self._reading, self._labels = reading, labels

    def __enter__(self) -> None:
        self._reading.current_gpu = self._labels

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reading.end_call()


def collector(*kinds: type[GpuValue]) -> Callable[[Reading], Iterator[Metric]]:
    """Return a collector of the metrics that the fields of these classes declare."""
    declared = [(kind, list(_series(kind))) for kind in kinds]

    def families(reading: Reading) -> Iterator[Metric]:
        for kind, metrics in declared:
            rows = reading.read(kind)
            for metric, value in metrics:
                family = keyed_family if len(metric.labels) > len(GPU) else value_family
                yield family(metric, rows, value)

    return families


def _series(kind: type[GpuValue]) -> Iterator[tuple[MetricSpec, Callable[[Any], Any]]]:
    """Yield the metrics of a class, each with the function that takes its value from an object."""
    for each in fields(kind):  # type: ignore[arg-type] # every GpuValue is a dataclass
        if "metric" in each.metadata:
            yield each.metadata["metric"], _value_of(each.name, each.metadata["by_key"])


def _value_of(name: str, by_key: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    value = attrgetter(name)
    return value if by_key is None else lambda each: by_key(value(each))
