"""The exporter process while its node changes: GPUs, driver and MIG instances come and go."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support.exporter_process import ExporterProcess, exporter_process
from support.exposition import Exposition
from support.fake_nvml import LIBRARY, FakeNode
from support.waiting import until

SUCCESS = "torchmem_exporter_collector_success"


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """Two H100."""
    return FakeNode(tmp_path / "node", "hung")


def heal(node: FakeNode) -> None:
    """Let the call that hangs on the node `hung` return."""
    node.change("gpu 1", nvmlDeviceGetUtilizationRates="success")


def scraped_until(
    exporter: ExporterProcess, condition: Callable[[Exposition], object]
) -> Exposition:
    """Scrape until `condition` is true."""
    return until(
        lambda: next(
            (exposition for exposition in [exporter.scrape()] if condition(exposition)), None
        ),
        pause=0.1,
    )


def both_read(exposition: Exposition) -> bool:
    """Return whether a scrape has read both GPUs before its deadline."""
    return len(exposition.matching("nvml_utilization_ratio", engine="gpu")) == 2


def test_gpu_is_lost_and_comes_back(node: FakeNode, run_dir: Path) -> None:
    """A lost GPU costs its own values, which are back in the scrape after it responds again."""
    heal(node)
    with exporter_process(node, run_dir) as exporter:
        before = exporter.scrape()
        node.change("gpu 1", error="gpu_is_lost")
        lost = exporter.scrape()
        node.change("gpu 1", error="success")
        after = exporter.scrape()

    assert lost.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 0.0}
    assert lost.by("gpu", "nvml_gpu_error_code") == {"1": 15.0}
    assert set(lost.by("gpu", "nvml_power_watts")) == {"0"}
    for name in (
        "nvml_gpu_up",
        "nvml_power_watts",
        "nvml_memory_used_bytes",
        "nvml_gpu_error_code",
    ):
        assert before.series.get(name) == after.series.get(name)


def test_gpu_hangs_and_is_released(node: FakeNode, run_dir: Path) -> None:
    """While a call on one GPU hangs, the other one is complete; when it returns, both are."""
    heal(node)
    with exporter_process(node, run_dir, scrape_deadline_seconds=3) as exporter:
        scraped_until(exporter, both_read)  # so that the collection of its start is over
        before = node.calls("nvmlDeviceGetUtilizationRates")
        node.change("gpu 1", nvmlDeviceGetUtilizationRates="hang")
        first = exporter.scrape()
        hung = [exporter.scrape() for _ in range(5)]
        calls = node.calls("nvmlDeviceGetUtilizationRates") - before
        heal(node)
        scraped_until(exporter, both_read)
        messages = [line for line in exporter.messages.splitlines() if "GPU 1 (" in line]

    assert first.value("nvml_up", reason="timeout") == 0.0
    assert (
        first.value(SUCCESS, collector="utilization"),
        first.value(SUCCESS, collector="samples"),
    ) == (0.0, 1.0)
    assert first.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 0.0}
    for exposition in hung:
        assert exposition.value("nvml_up") == 1.0
        assert exposition.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 0.0}
        assert set(exposition.by("gpu", "nvml_gpu_info")) == {"0", "1"}
        assert (
            {"0"}
            == set(exposition.by("gpu", "nvml_utilization_ratio"))
            == set(exposition.by("gpu", "nvml_power_watts"))
        )
        assert set(exposition.by("collector", SUCCESS).values()) == {1.0}
    assert ["utilization" in line for line in messages] == [True, False]
    assert calls == 1 + 6


def test_driver_hangs_and_is_released(node: FakeNode, run_dir: Path) -> None:
    """While a call on NVML as a whole hangs, scrapes are served, and nothing else is called."""
    heal(node)
    with exporter_process(node, run_dir, scrape_deadline_seconds=3) as exporter:
        scraped_until(exporter, both_read)
        node.change("node", nvmlDeviceGetCount_v2="hang")
        exporter.scrape()
        calls = len(re.findall("nvmlDeviceGet", node.log.read_text()))
        hung = [exporter.scrape() for _ in range(5)]
        later_calls = len(re.findall("nvmlDeviceGet", node.log.read_text()))
        node.change("node", nvmlDeviceGetCount_v2="success")
        scraped_until(exporter, both_read)

    assert calls == later_calls
    for exposition in hung:
        assert exposition.value("nvml_up", reason="timeout") == 0.0
        assert (
            exposition.value(SUCCESS, collector="utilization"),
            exposition.value(SUCCESS, collector="samples"),
        ) == (0.0, 1.0)


def test_hung_gpu_does_not_delay_the_end(node: FakeNode, run_dir: Path) -> None:
    """SIGTERM ends the exporter with 0 while a call on one GPU hangs."""
    with exporter_process(node, run_dir, scrape_deadline_seconds=3) as exporter:
        exporter.scrape()
        exporter.scrape()
        exporter.popen.send_signal(signal.SIGTERM)

        assert exporter.popen.wait(60) == 0
        assert "Traceback" not in exporter.messages


def test_hung_driver_does_not_delay_the_end(node: FakeNode, run_dir: Path) -> None:
    """SIGTERM ends the exporter with 0 while a scrape waits for a call that hangs."""
    with exporter_process(node, run_dir, scrape_deadline_seconds=300) as exporter:
        until(lambda: node.calls("nvmlDeviceGetUtilizationRates") == 2)
        exporter.popen.send_signal(signal.SIGTERM)

        assert exporter.popen.wait(60) == 0
        assert "Traceback" not in exporter.messages


@pytest.mark.parametrize(
    ("code", "reason"), [("driver_not_loaded", "driver_not_loaded"), ("unknown", "unknown_error")]
)
def test_driver_is_reloaded(node: FakeNode, run_dir: Path, code: str, reason: str) -> None:
    """A driver that was reloaded or was lost is opened again; until then a reason is exposed."""
    heal(node)
    with exporter_process(node, run_dir) as exporter:
        before = exporter.scrape()
        node.change("node", error=code)
        unloaded = exporter.scrape()
        node.change("node", error="success")
        after = scraped_until(exporter, lambda exposition: exposition.value("nvml_up") == 1.0)

    assert unloaded.value("nvml_up", reason=reason) == 0.0
    assert unloaded.matching("nvml_power_watts") == {}
    assert before.series["nvml_memory_used_bytes"] == after.series["nvml_memory_used_bytes"]
    assert node.calls("nvmlInitWithFlags") >= 2


def test_driver_is_installed(node: FakeNode, run_dir: Path, tmp_path: Path) -> None:
    """An exporter that started on a node without the library finds it once it is installed."""
    heal(node)
    library = tmp_path / LIBRARY
    library.touch()  # an empty file hides the library of a node that has one
    with exporter_process(node, run_dir, {"LD_LIBRARY_PATH": str(tmp_path)}) as exporter:
        before = exporter.scrape()
        library.unlink()
        library.symlink_to(node.library() / LIBRARY)
        after = scraped_until(exporter, lambda exposition: exposition.value("nvml_up") == 1.0)

    assert before.value("nvml_up", reason="library_not_found") == 0.0
    assert set(after.by("gpu", "nvml_memory_used_bytes")) == {"0", "1"}


def test_mig_is_reconfigured(tmp_path: Path, run_dir: Path) -> None:
    """Only the new instances are exposed, also if one has the id of an old one."""
    node = FakeNode(tmp_path / "node", "mig")
    with exporter_process(node, run_dir) as exporter:
        before = exporter.scrape()
        for index in range(3):
            node.remove(f"mig 0/{index}")
        node.change(
            "mig 0/0",
            UUID="MIG-new",
            Name="NVIDIA H100 80GB HBM3 MIG 7g.80gb",
            GpuInstanceId=2,
            ComputeInstanceId=0,
            MemoryInfo="84825604096 424128020 84401476076 0",
            ComputeRunningProcesses="",
        )
        after = exporter.scrape()

    assert set(before.by("profile", "nvml_mig_info")) == {"3g.40gb", "2g.20gb", "1g.10gb"}
    assert before.by("gpu_instance", "nvml_mig_memory_total_bytes") == {
        "2": 42412802048.0,
        "3": 21076377600.0,
        "9": 10468982784.0,
    }
    assert set(after.by("profile", "nvml_mig_info")) == {"7g.80gb"}
    assert after.by("gpu_instance", "nvml_mig_memory_total_bytes") == {"2": 84825604096.0}


def test_xid_is_counted(node: FakeNode, run_dir: Path) -> None:
    """An XID error counts once, on its GPU and under its code, however many scrapes follow."""
    heal(node)
    with exporter_process(node, run_dir) as exporter:
        exporter.scrape()
        node.change("node", **{"event.1": "1 0x8 79", "event.2": "1 0x8 31", "event.3": "1 0x8 31"})
        scraped_until(
            exporter,
            lambda exposition: sum(exposition.matching("nvml_xid_errors_total").values()) == 3.0,
        )
        exposition = exporter.scrape()

    assert {
        xid: count
        for xid, count in exposition.by("xid", "nvml_xid_errors_total", gpu="1").items()
        if count
    } == {"79": 1.0, "31": 2.0}
    assert (
        exposition.series["nvml_xid_last_timestamp_seconds"].keys()
        <= exposition.series["nvml_xid_errors_total"].keys()
    )


def test_simultaneous_scrapes_share_one_collection(node: FakeNode, run_dir: Path) -> None:
    """Two servers that scrape at once get the same values from one reading."""
    heal(node)
    with exporter_process(node, run_dir) as exporter:
        exporter.scrape()
        before = node.calls("nvmlDeviceGetCount_v2")
        node.change("gpu 1", nvmlDeviceGetUtilizationRates="hang")
        servers = [HTTPConnection(exporter.url.removeprefix("http://")) for _ in range(2)]
        for server in servers:
            server.request("GET", "/metrics")
        for _ in range(3):
            exporter.get(
                "/-/healthy"
            )  # asked later: when it is answered, the scrapes were taken up
        heal(node)
        first, second = (server.getresponse().read() for server in servers)
        for server in servers:
            server.close()

    assert first == second
    assert before + 1 == node.calls("nvmlDeviceGetCount_v2")
