"""A stand-in for the module pynvml: the same functions and errors, answers and failures set by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NOT_AVAILABLE = (1 << 64) - 1
ALL_LINKS = (1 << 32) - 1


class NVMLError(Exception):
    """As in pynvml: carries NVML's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML return code {value}")
        self.value = value


def uuid_of(index: Any) -> str:
    """The UUID of the GPU at an index, or of a MIG device (a pair of GPU and number)."""
    if isinstance(index, tuple):
        return f"MIG-{index[0]:08d}-0000-4000-8000-{index[1]:012d}"
    return f"GPU-{index:08d}-0000-4000-8000-000000000000"


def process(pid: int, used: int | None) -> SimpleNamespace:
    """One row of a process list."""
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class FakeBinding:
    """`count` equal 80 GiB GPUs, whose handle is their index.

    `fail(name, code, gpu)` makes a function return an NVML code, for one GPU or all; `block(name, gpu)` makes it
    wait for the returned event, and `waits` counts how often one did; `answers` replaces what a function returns;
    `fields` holds field values by id, or by (id, scope); `calls` counts.
    """

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - pynvml's name

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.calls: Counter[str] = Counter()
        self.waits = 0
        self.fields: dict[Any, int] = {82: 70}
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[4:12]),
            "nvmlDeviceGetUUID": uuid_of,
            "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=b"00000000:18:00.0"),
            "nvmlDeviceGetMemoryInfo": _memory,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97, memory=41),
            "nvmlDeviceGetPowerUsage": lambda gpu: 412_500,
            "nvmlDeviceGetTemperatureV": lambda gpu, sensor: 61,
            "nvmlDeviceGetFieldValues": lambda gpu, fields: [
                self._field(field) for field in fields
            ],
            "nvmlDeviceGetComputeRunningProcesses_v3": lambda gpu: [process(100 + gpu, 2 * GIB)],
            "nvmlDeviceGetGraphicsRunningProcesses_v3": lambda gpu: [],
            "nvmlDeviceGetMPSComputeRunningProcesses_v3": lambda gpu: [],
        }
        self._failures: dict[tuple[str, Any], int] = {}
        self._blocks: dict[tuple[str, Any], Event] = {}

    def fail(self, name: str, code: int, gpu: int | None = None) -> None:
        """From now on `name` returns `code`."""
        self._failures[name, gpu] = code

    def heal(self) -> None:
        """No function fails any more."""
        self._failures.clear()

    def block(self, name: str, gpu: int | None = None) -> Event:
        """From now on `name` returns only when the event is set."""
        return self._blocks.setdefault((name, gpu), Event())

    def cut(self, gpu: int, instances: Sequence[tuple[int, int]], most: int = 7) -> None:
        """MIG mode on one GPU: (GPU instance, compute instance) of its MIG devices, from index 1, of 10 GiB each."""
        devices = {(gpu, number): instance for number, instance in enumerate(instances, start=1)}

        def device(parent: int, index: int) -> tuple[int, int]:
            if (parent, index) not in devices:
                raise NVMLError(6)
            return parent, index

        plain = self.answers["nvmlDeviceGetComputeRunningProcesses_v3"]
        self.answers |= {
            "nvmlDeviceGetMigMode": lambda parent: [int(parent == gpu)] * 2,
            "nvmlDeviceGetMaxMigDeviceCount": lambda parent: most,
            "nvmlDeviceGetMigDeviceHandleByIndex": device,
            "nvmlDeviceGetGpuInstanceId": lambda handle: devices[handle][0],
            "nvmlDeviceGetComputeInstanceId": lambda handle: devices[handle][1],
            "nvmlDeviceGetName": lambda handle: (
                "NVIDIA H100 80GB HBM3" + (" MIG 1g.10gb" if isinstance(handle, tuple) else "")
            ),
            "nvmlDeviceGetComputeRunningProcesses_v3": lambda handle: (
                [process(500 + handle[1], GIB)] if isinstance(handle, tuple) else plain(handle)
            ),
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in self.answers:
            raise AttributeError(name)
        return lambda *arguments, **keywords: self._call(name, *arguments, **keywords)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:  # noqa: N802 - pynvml's name
        """An empty request for GPM metrics."""
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(98)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def _field(self, wanted: Any) -> SimpleNamespace:
        if wanted not in self.fields:
            return SimpleNamespace(nvmlReturn=3, valueType=0, value=SimpleNamespace())
        return SimpleNamespace(
            nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=self.fields[wanted])
        )

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        self.calls[name] += 1
        gpu = (
            arguments[0]
            if arguments and not isinstance(arguments[0], (list, SimpleNamespace))
            else None
        )
        for key in ((name, None), (name, gpu), ("*", gpu)):
            if key in self._blocks:
                self.waits += 1
                assert self._blocks[key].wait(60)
            if key in self._failures:
                raise NVMLError(self._failures[key])
        return self.answers[name](*arguments, **keywords)


def _memory(gpu: Any, version: int | None = None) -> SimpleNamespace:
    if isinstance(gpu, tuple):
        return SimpleNamespace(total=10 * GIB, used=2 * GIB, free=7 * GIB, reserved=GIB)
    if version is None:
        return SimpleNamespace(total=80 * GIB, used=3 * GIB, free=77 * GIB)
    return SimpleNamespace(total=80 * GIB, used=2 * GIB, free=77 * GIB, reserved=GIB)
