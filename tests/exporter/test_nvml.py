"""NVML's failures: each costs exactly what it must, and no value is invented."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.exposition import Exposition, scrape
from support.fake_nvml import FakeNode

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.driver import MIN_RETRY_SECONDS, Driver
from torchmem.exporter.gpus import GpuFault, GpuIdentity
from torchmem.exporter.nvml import (
    GpuLostError,
    NvmlCallError,
    NvmlDevice,
    NvmlDownError,
    NvmlLibrary,
    text,
)
from torchmem.exporter.subjects.power import Power

OpenExporter = Callable[..., Exporter]
FUNCTION_NOT_FOUND, GPU_IS_LOST = 13, 15
GPUS = [str(index) for index in range(8)]
PER_GPU = (
    "nvml_memory_used_bytes",
    "nvml_power_watts",
    "nvml_temperature_celsius",
    "nvml_process_memory_bytes",
)
POWER, UTILIZATION = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """Eight H100."""
    return FakeNode(tmp_path / "node", "h100_busy")


def gpus_of(exposition: Exposition, name: str) -> set[str]:
    """Return the GPUs that have a series of that name."""
    return set(exposition.by("gpu", name))


def uuid_of(exposition: Exposition, gpu: str) -> str:
    """Return the UUID of a GPU."""
    (labels,) = exposition.matching("nvml_gpu_up", gpu=gpu)
    return dict(labels)["uuid"]


class NVMLError(Exception):
    """Like pynvml's: carries NVML's return code."""

    def __init__(self, value: int) -> None:
        self.value = value


def library_returning(*codes: int, name: str = "nvmlPing") -> NvmlLibrary:
    """Return a library with one function, whose calls return these codes in turn, then "pong"."""
    coming = iter(codes)

    def function() -> str:
        for code in coming:
            raise NVMLError(code)
        return "pong"

    return NvmlLibrary(SimpleNamespace(NVMLError=NVMLError, **{name: function}))


@pytest.mark.parametrize("code", [0, 2, 3, 4, 6, 13, 21, 25])
def test_unavailable_values_are_none(code: int) -> None:
    """Unsupported, not permitted, no data: no value and no error."""
    assert library_returning(code).call("nvmlPing") is None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (1, NvmlDownError),
        (9, NvmlDownError),
        (18, NvmlDownError),
        (10, GpuLostError),
        (15, GpuLostError),
        (16, GpuLostError),
        (999, NvmlCallError),
        (77, NvmlCallError),
    ],
)
def test_failures_are_typed(code: int, error: type[Exception]) -> None:
    """What does not respond, NVML, the GPU or only this call, decides about the error."""
    with pytest.raises(error):
        library_returning(code).call("nvmlPing")


def test_function_that_the_binding_lacks_is_unavailable() -> None:
    """An older nvidia-ml-py is like an older driver."""
    assert library_returning().call("nvmlPong") is None


def test_newest_known_function_is_called() -> None:
    """Of several names the first one that driver and binding know returns the value."""
    assert library_returning().call_first(("nvmlPing_v2", "nvmlPing")) == "pong"


def test_list_that_grew_is_read_again() -> None:
    """A process that starts while the list is read does not hide the others."""
    assert library_returning(7).call("nvmlPing") == "pong"
    assert library_returning(7, 7).call("nvmlPing") is None


@pytest.mark.parametrize(
    ("value", "expected"), [(b"580\xff", "580\\xff"), ("580", "580"), (None, None)]
)
def test_text_of_older_bindings(value: object, expected: str | None) -> None:
    """Older versions of nvidia-ml-py return text as bytes."""
    assert text(value) == expected


def test_missing_binding_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the exporter reports that NVML is down."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(NvmlDownError, match="pynvml_not_installed"):
        NvmlLibrary().require("nvmlInit")


def test_memory_adds_up(open_exporter: OpenExporter, node: FakeNode) -> None:
    """used + free + reserved = total on every GPU."""
    exposition = scrape(open_exporter(node.nvml()))
    parts = [
        exposition.by("gpu", f"nvml_memory_{part}_bytes") for part in ("used", "free", "reserved")
    ]

    assert exposition.by("gpu", "nvml_memory_total_bytes") == {
        gpu: sum(part[gpu] for part in parts) for gpu in GPUS
    }


@pytest.mark.parametrize(
    "code", ["not_supported", "no_permission", "not_found", "function_not_found"]
)
def test_unavailable_value_is_absent_and_logged_once(
    open_exporter: OpenExporter, node: FakeNode, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """An unsupported value is neither 0 nor a failure of the GPU or of the collector."""
    caplog.set_level(logging.INFO)
    node.change("node", **{POWER: code})
    exporter = open_exporter(node.nvml())
    scrape(exporter)

    exposition = scrape(exporter)

    assert exposition.matching("nvml_power_watts") == {}
    assert dict.fromkeys(GPUS, 1.0) == exposition.by("gpu", "nvml_gpu_up")
    assert exposition.value("torchmem_exporter_collector_success", collector="power") == 1.0
    assert sum(POWER in message for message in caplog.messages) == 1


def test_unexpected_code_costs_one_value(open_exporter: OpenExporter, node: FakeNode) -> None:
    """An unknown error of a call fails its collector for that GPU; everything else is there."""
    node.change("gpu 0", **{POWER: "unknown"})
    exposition = scrape(open_exporter(node.nvml()))

    assert dict.fromkeys(GPUS, 1.0) == exposition.by("gpu", "nvml_gpu_up")
    assert gpus_of(exposition, "nvml_power_watts") == set(GPUS) - {"0"}
    assert set(exposition.by("gpu", "nvml_temperature_celsius", sensor="gpu")) == set(GPUS)
    assert {
        name
        for name, ok in exposition.by("collector", "torchmem_exporter_collector_success").items()
        if not ok
    } == {"power"}


def test_implausible_processes_are_left_out(open_exporter: OpenExporter, node: FakeNode) -> None:
    """A row with more memory than the GPU has is a structure of another version, not a process."""
    rows = f"7:5:0:0 8:{81 << 30}:0:0 0:1:0:0"
    node.change("gpu 3", ComputeRunningProcesses=rows)

    exposition = scrape(open_exporter(node.nvml()))

    assert exposition.by("pid", "nvml_process_memory_bytes", gpu="3") == {"7": 5.0}


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("nvmlInitWithFlags", "#12", "library_not_found"),
        ("nvmlInitWithFlags", "driver_not_loaded", "driver_not_loaded"),
        ("nvmlInitWithFlags", "lib_rm_version_mismatch", "driver_library_version_mismatch"),
        ("nvmlInitWithFlags", "unknown", "unknown_error"),
        ("nvmlInitWithFlags", "#77", "nvml_error_77"),
        ("nvmlDeviceGetCount_v2", "uninitialized", "uninitialized"),
        ("nvmlDeviceGetHandleByIndex_v2", "driver_not_loaded", "driver_not_loaded"),
    ],
)
def test_nvml_that_is_down_has_a_reason(
    open_exporter: OpenExporter, node: FakeNode, name: str, code: str, reason: str
) -> None:
    """A node whose NVML does not respond still serves, and shows why."""
    node.change("node", **{name: code})

    exposition = scrape(open_exporter(node.nvml()))

    assert exposition.value("nvml_up", reason=reason) == 0.0
    assert exposition.value("torchmem_exporter_collector_success", collector="gpu") == 0.0
    assert exposition.value("torchmem_exporter_collector_success", collector="samples") == 1.0


def test_unexpected_exception_is_a_reason(open_exporter: OpenExporter) -> None:
    """An unforeseen error is a reason like any other."""

    def fail() -> list[FakeGpu]:
        raise ValueError

    exposition = scrape(open_exporter(FakeNvml(fail)))

    assert exposition.value("nvml_up", reason="unexpected_error") == 0.0


def test_absent_library_is_retried_with_growing_pauses() -> None:
    """A driver that is loaded later is found; until then attempts become rare."""
    now, attempts, is_down = [0.0], [0], [True]

    def opened(call: object, _gpu: object) -> None:
        if call == "open":
            attempts[0] += 1
            if is_down[0]:
                raise NvmlDownError("library_not_found")

    fake_gpu = FakeGpu(GpuIdentity(0, "GPU-a"))
    driver = Driver(FakeNvml(lambda: [fake_gpu], on_call=opened), clock=lambda: now[0])
    for _ in range(100):
        with pytest.raises(NvmlDownError) as caught:
            driver.list_gpus()
        driver.fail(caught.value)
        now[0] += MIN_RETRY_SECONDS / 2
    is_down[0] = False
    now[0] += 3600

    assert attempts[0] == 6
    assert len(driver.list_gpus().present) == 1


def test_one_lost_gpu_of_eight(open_exporter: OpenExporter, node: FakeNode) -> None:
    """A GPU that falls off the bus keeps a series with UUID and code; the others stay complete."""
    exporter = open_exporter(node.nvml())
    uuid = uuid_of(scrape(exporter), "3")
    node.change("gpu 3", error="gpu_is_lost")

    exposition = scrape(exporter)

    assert {gpu: float(gpu != "3") for gpu in GPUS} == exposition.by("gpu", "nvml_gpu_up")
    assert exposition.value("nvml_gpu_error_code", gpu="3", uuid=uuid) == GPU_IS_LOST
    assert gpus_of(exposition, "nvml_gpu_error_code") == {"3"}
    assert len(exposition.matching("nvml_gpu_info", gpu="3", uuid=uuid)) == 1
    assert [gpus_of(exposition, name) for name in PER_GPU] == [set(GPUS) - {"3"}] * 4
    assert exposition.value("nvml_up") == 1.0


def test_loss_and_return_are_logged_once(
    open_exporter: OpenExporter, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when a GPU is lost, one when it is back, none for each scrape in between."""
    caplog.set_level(logging.INFO, "torchmem.exporter.driver")
    exporter = open_exporter(node.nvml())
    uuid = uuid_of(scrape(exporter), "3")
    node.change("gpu 3", error="gpu_is_lost")
    for _ in range(3):
        scrape(exporter)
    node.change("gpu 3", error="success")
    for _ in range(2):
        scrape(exporter)

    assert [message for message in caplog.messages if uuid in message] == [
        f"GPU 3 ({uuid}) is lost: NVML return code 15, the GPU is lost",
        f"GPU 3 ({uuid}) responds again",
    ]


def test_gpu_lost_before_the_exporter_started(open_exporter: OpenExporter, node: FakeNode) -> None:
    """Without a UUID the NVML index still names the GPU that does not respond."""
    node.change("gpu 3", nvmlDeviceGetHandleByIndex_v2="gpu_is_lost")

    exposition = scrape(open_exporter(node.nvml()))

    assert exposition.value("nvml_gpu_up", gpu="3") == 0.0
    assert sum(exposition.by("gpu", "nvml_gpu_up").values()) == 7


def test_gpu_lost_in_the_middle_of_a_reading(open_exporter: OpenExporter, node: FakeNode) -> None:
    """What a GPU returned before it failed is served; it is not called again in that scrape."""
    node.change("gpu 3", **{UTILIZATION: "gpu_is_lost"})

    exposition = scrape(open_exporter(node.nvml()))

    assert exposition.value("nvml_gpu_up", gpu="3") == 0.0
    assert "3" in gpus_of(exposition, "nvml_memory_used_bytes")
    assert "3" not in gpus_of(exposition, "nvml_power_watts")
    assert node.calls(POWER) == 7


def test_gpu_that_vanished_from_the_list_is_remembered() -> None:
    """After the driver renumbered the others, the missing one keeps its UUID and its old index."""
    uuids = [f"GPU-{index}" for index in range(8)]
    driver = Driver(FakeNvml(lambda: [FakeGpu(GpuIdentity(*gpu)) for gpu in enumerate(uuids)]))
    driver.list_gpus()
    uuids.remove("GPU-3")

    gpus = driver.list_gpus()

    assert gpus.lost == {("3", "GPU-3"): 6}
    assert ("3", "GPU-4") in {gpu.labels for gpu in gpus.present}


def test_gpu_without_uuid_is_a_fault(node: FakeNode) -> None:
    """Two GPUs are never merged because one of them has no identity."""
    node.change("gpu 1", nvmlDeviceGetUUID="not_supported")
    nvml = node.nvml()
    nvml.open()

    assert GpuFault(1, 3) == nvml.gpu(1)


def test_gpu_that_is_gone_is_not_found(node: FakeNode) -> None:
    """A UUID that the driver does not know any more has a return code, a known one has none."""
    nvml = node.nvml()
    nvml.open()
    gpu = nvml.gpu(0)
    assert isinstance(gpu, GpuIdentity)

    assert [nvml.fault(gpu.uuid), nvml.fault("GPU-unknown")] == [None, 6]


def test_power_of_each_gpu_is_its_own(node: FakeNode) -> None:
    """Values are read with the handle of the GPU that is asked for."""
    nvml = node.nvml()
    nvml.open()
    gpus = [nvml.gpu(index) for index in range(2)]
    values = [nvml.read(Power, gpu.uuid) for gpu in gpus if isinstance(gpu, GpuIdentity)]

    assert [value.watts for value in values if value] == [690.0, 685.679]


def test_node_without_gpus(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """Zero GPUs are not a failure."""
    exposition = scrape(open_exporter(FakeNode(tmp_path / "node", "zero_gpus").nvml()))

    assert exposition.value("nvml_up") == 1.0
    assert exposition.matching("nvml_gpu_up") == {}


def test_missing_values_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Calls that return no value are logged once, grouped by reason."""
    caplog.set_level(logging.INFO)
    missing = NvmlLibrary(SimpleNamespace()).missing_values

    for name, code in [("A", 13), ("B", 13), ("C", 3), ("A", 13), ("Versions", 4)]:
        missing.note(logging.INFO, name, code)
    for _ in range(2):
        missing.log()
    missing.note(logging.INFO, "A", 13)
    missing.note(logging.WARNING, "C", 999)
    missing.log()

    assert caplog.messages == [
        (
            "NVML returns no value: not supported (code 3): C; no permission (code 4): Versions; "
            "function not found (code 13): A, B"
        ),
        "NVML returns no value: unknown error (code 999): C",
    ]


def test_what_never_changes_is_read_once() -> None:
    """A constant is asked for once until NVML is closed, and again while it is not available."""
    answers, asked = [None, 1980, 2100], list[str]()

    def maximum(handle: str) -> int:
        asked.append(handle)
        answer = answers.pop(0)
        if answer is None:
            raise UnavailableError
        return answer

    class UnavailableError(Exception):
        value = 3

    nvml = NvmlLibrary(SimpleNamespace(maximum=maximum, NVMLError=UnavailableError))
    gpu = NvmlDevice(nvml, "gpu")
    values = [gpu.constant("maximum") for _ in range(3)]
    gpu.release()
    values.append(gpu.constant("maximum"))

    assert values == [None, 1980, 1980, 2100]
    assert asked == ["gpu"] * 3
