"""NVML through its Python binding: every kind of failure costs exactly what it must, and no value is invented."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.exposition import Exposition, scrape
from support.nvml_binding import GIB, NOT_AVAILABLE, FakeBinding, process, uuid_of

from torchmem.exporter.collect import Exporter
from torchmem.exporter.driver import FIRST_PAUSE_SECONDS, Driver
from torchmem.exporter.gpu import GpuFault, GpuIdentity, NvmlDownError
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.values import MemoryInfo, ProcessMemory, Utilization

OpenExporter = Callable[..., Exporter]
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 13, 15
PER_GPU = (
    "nvml_memory_used_bytes",
    "nvml_power_watts",
    "nvml_temperature_celsius",
    "nvml_process_memory_bytes",
)


@pytest.fixture
def binding() -> FakeBinding:
    """A node with eight GPUs."""
    return FakeBinding(8)


@pytest.fixture
def nvml(binding: FakeBinding) -> PyNvml:
    """NVML over that binding, open, its GPUs listed."""
    nvml = PyNvml(binding)
    nvml.open()
    for index in range(nvml.count()):
        nvml.gpu(index)
    return nvml


def gpus_of(shown: Exposition, name: str) -> set[str]:
    """The GPUs that have a series of that name."""
    return set(shown.by("gpu", name))


def test_values_come_in_base_units(nvml: PyNvml) -> None:
    """Percent become ratios, milliwatts watts; identity is complete."""
    uuid = uuid_of(0)

    assert GpuIdentity(
        0, uuid, "NVIDIA H100 80GB HBM3", "00000000:18:00.0", "580.65.06"
    ) == nvml.gpu(0)
    assert MemoryInfo(total=80 * GIB, used=2 * GIB, free=77 * GIB, reserved=GIB) == nvml.memory(
        uuid
    )
    assert Utilization(0.97, 0.41) == nvml.utilization(uuid)
    assert 412.5 == nvml.power(uuid).watts
    assert {"gpu": 61, "memory": 70} == nvml.temperatures(uuid).sensors


def test_memory_adds_up(open_exporter: OpenExporter, binding: FakeBinding) -> None:
    """used + free + reserved = total on every GPU."""
    shown = scrape(open_exporter(PyNvml(binding)))
    parts = [shown.by("gpu", f"nvml_memory_{part}_bytes") for part in ("used", "free", "reserved")]

    assert shown.by("gpu", "nvml_memory_total_bytes") == {
        gpu: sum(part[gpu] for part in parts) for gpu in parts[0]
    }


@pytest.mark.parametrize("code", [FUNCTION_NOT_FOUND, 25])
def test_older_driver_gives_no_reserved_memory(
    binding: FakeBinding, nvml: PyNvml, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Without the second version of the call the first one answers: what it cannot tell is absent, and no complaint."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    both = binding.answers["nvmlDeviceGetMemoryInfo"]

    def only_first(gpu: int, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise binding.NVMLError(code)
        answer: SimpleNamespace = both(gpu)
        return answer

    binding.answers["nvmlDeviceGetMemoryInfo"] = only_first

    assert MemoryInfo(total=80 * GIB, used=3 * GIB, free=77 * GIB, reserved=None) == nvml.memory(
        uuid_of(0)
    )
    assert [] == caplog.messages


@pytest.mark.parametrize(
    ("milliwatts", "watts"), [(664_074, 664.074), (700_001, 700.001), (1, 0.001)]
)
def test_units_add_no_noise(
    binding: FakeBinding, nvml: PyNvml, milliwatts: int, watts: float
) -> None:
    """A value is the number that one would write down, without digits of the conversion."""
    binding.answers["nvmlDeviceGetPowerUsage"] = lambda gpu: milliwatts

    assert watts == nvml.power(uuid_of(0)).watts


def test_value_that_no_version_gives_is_logged(
    binding: FakeBinding, nvml: PyNvml, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the older call fails too, it is said, once."""
    caplog.set_level(logging.INFO)
    binding.fail("nvmlDeviceGetMemoryInfo", FUNCTION_NOT_FOUND)

    assert [None, None] == [nvml.memory(uuid_of(0)), nvml.memory(uuid_of(1))]
    assert ["nvmlDeviceGetMemoryInfo gives no value here: NVML return code 13"] == caplog.messages


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, 6, FUNCTION_NOT_FOUND])
def test_what_nvml_cannot_give_is_absent_and_logged_once(
    open_exporter: OpenExporter, binding: FakeBinding, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """An unsupported value is neither zero nor a failure of the GPU or of the collector."""
    caplog.set_level(logging.INFO)
    binding.fail("nvmlDeviceGetPowerUsage", code)
    exporter = open_exporter(PyNvml(binding))
    scrape(exporter)

    shown = scrape(exporter)

    assert {} == shown.matching("nvml_power_watts")
    assert {str(gpu): 1.0 for gpu in range(8)} == shown.by("gpu", "nvml_gpu_up")
    assert 1.0 == shown.value("torchmem_exporter_collector_success", collector="power")
    assert 1 == sum("nvmlDeviceGetPowerUsage" in message for message in caplog.messages)


def test_all_ones_mean_unknown(binding: FakeBinding, nvml: PyNvml) -> None:
    """NVML's mark for not available never becomes 1.8e19 bytes or 4294967 watts."""
    binding.answers["nvmlDeviceGetPowerUsage"] = lambda gpu: (1 << 32) - 1
    binding.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = lambda gpu: [
        process(7, NOT_AVAILABLE)
    ]

    assert nvml.power(uuid_of(0)).watts is None
    assert [ProcessMemory(7, None)] == nvml.processes(uuid_of(0))


def test_processes_of_all_kinds_are_listed_once(
    binding: FakeBinding, nvml: PyNvml, caplog: pytest.LogCaptureFixture
) -> None:
    """A pid that holds a compute and a graphics context is one process; older drivers answer the older call."""
    del binding.answers["nvmlDeviceGetComputeRunningProcesses_v3"]
    binding.answers["nvmlDeviceGetComputeRunningProcesses_v2"] = lambda gpu: [
        process(7, 5),
        process(8, None),
    ]
    binding.answers["nvmlDeviceGetGraphicsRunningProcesses_v3"] = lambda gpu: [
        process(7, 9),
        process(9, 1),
    ]
    binding.answers["nvmlDeviceGetMPSComputeRunningProcesses_v3"] = lambda gpu: [process(8, 3)]

    caplog.set_level(logging.INFO)
    caplog.clear()

    found = nvml.processes(uuid_of(0))

    assert [] == [message for message in caplog.messages if "RunningProcesses" in message]
    assert [ProcessMemory(7, 9), ProcessMemory(8, 3), ProcessMemory(9, 1)] == found


def test_unlisted_processes_are_unknown_not_none(binding: FakeBinding, nvml: PyNvml) -> None:
    """Without permission for any list there is no empty list."""
    for kind in ("Compute", "Graphics", "MPSCompute"):
        binding.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", NO_PERMISSION)

    assert nvml.processes(uuid_of(0)) is None


def test_misread_process_rows_are_left_out(
    open_exporter: OpenExporter, binding: FakeBinding
) -> None:
    """A row with more memory than the GPU has is a structure of another version, not a process."""
    rows = [process(7, 5), process(8, 81 * GIB), process(0, 1)]
    binding.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = lambda gpu: rows

    shown = scrape(open_exporter(PyNvml(binding)))

    assert {"7": 5.0} == shown.by("pid", "nvml_process_memory_bytes", gpu="3")


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("nvmlInit", 12, "library_not_found"),
        ("nvmlInit", 9, "driver_not_loaded"),
        ("nvmlInit", 18, "driver_library_version_mismatch"),
        ("nvmlInit", 999, "unknown_error"),
        ("nvmlInit", 77, "nvml_error_77"),
        ("nvmlDeviceGetCount", 1, "uninitialized"),
        ("nvmlDeviceGetHandleByIndex", 9, "driver_not_loaded"),
        ("nvmlDeviceGetPowerUsage", 1, "uninitialized"),
    ],
)
def test_absent_nvml_has_a_reason(
    open_exporter: OpenExporter, binding: FakeBinding, name: str, code: int, reason: str
) -> None:
    """A node whose NVML does not answer still serves, and says why."""
    binding.fail(name, code)

    shown = scrape(open_exporter(PyNvml(binding)))

    assert 0.0 == shown.value("nvml_up", reason=reason)
    assert 0.0 == shown.value("torchmem_exporter_collector_success", collector="gpu")
    assert 1.0 == shown.value("torchmem_exporter_collector_success", collector="samples")


def test_absent_library_is_tried_again_with_growing_pauses(binding: FakeBinding) -> None:
    """A driver that is loaded later is found; until then attempts become rare."""
    now = [0.0]
    driver = Driver(PyNvml(binding), clock=lambda: now[0])
    binding.fail("nvmlInit", 12)
    for _ in range(100):
        with pytest.raises(NvmlDownError) as caught:
            driver.roll_call()
        driver.fail(caught.value)
        now[0] += FIRST_PAUSE_SECONDS / 2
    binding.heal()
    now[0] += 3600

    assert 6 == binding.calls["nvmlInit"]
    assert 8 == len(driver.roll_call().present)


def test_one_lost_gpu_of_eight(open_exporter: OpenExporter, binding: FakeBinding) -> None:
    """A GPU that falls off the bus stays as a series with UUID and code; the others stay complete."""
    exporter = open_exporter(PyNvml(binding))
    scrape(exporter)
    binding.fail("*", GPU_IS_LOST, gpu=3)

    shown = scrape(exporter)

    up = {str(gpu): float(gpu != 3) for gpu in range(8)}
    assert up == shown.by("gpu", "nvml_gpu_up")
    assert GPU_IS_LOST == shown.value("nvml_gpu_error_code", gpu="3", uuid=uuid_of(3))
    assert {"3"} == gpus_of(shown, "nvml_gpu_error_code")
    assert 1 == len(shown.matching("nvml_gpu_info", gpu="3", uuid=uuid_of(3)))
    assert [{str(gpu) for gpu in range(8)} - {"3"}] * 4 == [
        gpus_of(shown, name) for name in PER_GPU
    ]
    assert 1.0 == shown.value("nvml_up")


def test_loss_and_return_are_logged_once(
    open_exporter: OpenExporter, binding: FakeBinding, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when a GPU is lost, one when it is back, none for each scrape between."""
    caplog.set_level(logging.INFO, "torchmem.exporter.journal")
    exporter = open_exporter(PyNvml(binding))
    scrape(exporter)
    binding.fail("*", GPU_IS_LOST, gpu=3)
    for _ in range(3):
        scrape(exporter)
    binding.heal()
    for _ in range(2):
        scrape(exporter)

    told = [message for message in caplog.messages if uuid_of(3) in message]
    assert [
        f"GPU 3 ({uuid_of(3)}) is lost: NVML return code 15",
        f"GPU 3 ({uuid_of(3)}) answers again",
    ] == told


def test_gpu_lost_before_the_exporter_started(
    open_exporter: OpenExporter, binding: FakeBinding
) -> None:
    """Without a UUID ever seen the NVML index still names the GPU that does not answer."""
    binding.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, gpu=3)

    shown = scrape(open_exporter(PyNvml(binding)))

    assert 0.0 == shown.value("nvml_gpu_up", gpu="3")
    assert 7 == sum(shown.by("gpu", "nvml_gpu_up").values())


def test_gpu_lost_in_the_middle_of_a_reading(
    open_exporter: OpenExporter, binding: FakeBinding
) -> None:
    """What a GPU answered before it failed is served; it is not asked again in that scrape."""
    binding.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=3)

    shown = scrape(open_exporter(PyNvml(binding)))

    assert 0.0 == shown.value("nvml_gpu_up", gpu="3")
    assert "3" in gpus_of(shown, "nvml_memory_used_bytes")
    assert "3" not in gpus_of(shown, "nvml_power_watts")
    assert 7 == binding.calls["nvmlDeviceGetPowerUsage"]


def test_gpu_that_vanished_from_the_list_is_remembered(binding: FakeBinding) -> None:
    """After the driver renumbered the others, the missing one is known by its UUID, not by its old index."""
    driver = Driver(PyNvml(binding))
    driver.roll_call()
    left = [0, 1, 2, 4, 5, 6, 7]
    binding.count = len(left)
    binding.answers["nvmlDeviceGetHandleByIndex"] = left.__getitem__
    binding.fail("nvmlDeviceGetHandleByUUID", 6)

    roll = driver.roll_call()

    assert {("3", uuid_of(3)): 6} == roll.lost
    assert ("3", uuid_of(4)) in {gpu.labels for gpu in roll.present}


def test_gpu_without_uuid_is_a_fault(binding: FakeBinding) -> None:
    """Two cards are never merged because one of them gives no identity."""
    binding.fail("nvmlDeviceGetUUID", NOT_SUPPORTED, gpu=1)

    assert GpuFault(1, NOT_SUPPORTED) == PyNvml(binding).gpu(1)


def test_node_without_gpus(open_exporter: OpenExporter) -> None:
    """Zero GPUs are no failure."""
    shown = scrape(open_exporter(PyNvml(FakeBinding(0))))

    assert 1.0 == shown.value("nvml_up")
    assert {} == shown.matching("nvml_gpu_up")


def test_broken_binding_does_not_end_the_scrape(
    open_exporter: OpenExporter, binding: FakeBinding
) -> None:
    """An error nobody foresaw is a reason like any other."""
    del binding.answers["nvmlDeviceGetCount"]

    assert 0.0 == scrape(open_exporter(PyNvml(binding))).value("nvml_up", reason="unexpected_error")
