"""`torchmem mcp --exporter`: the ranks of another node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.assistant import Assistant, assistant
from support.publishing import own_process, own_sample, publish
from support.reports import STRANDED
from support.samples import UUID
from support.stack import free_port

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.explain.oom_report import encode
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.sample.run_directory import report_name, sample_name

GIB = 1 << 30


@pytest.fixture(scope="module")
def on_exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    """An assistant that asks an exporter of one GPU with one rank."""
    run_dir = tmp_path_factory.mktemp("run")
    process = own_process(run="nightly", rank=3)
    publish(run_dir, own_sample(process=process))
    name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
    publish(run_dir, encode(STRANDED), report_name(name, 1))
    gpu = FakeGpu(GpuIdentity(6, UUID), MemoryInfo(80 * GIB, 70 * GIB, 9 * GIB, GIB))
    collector = Exporter(FakeNvml.of(gpu), RunDirectory(run_dir))
    with (
        closing(collector),
        closing(serve(collector, "127.0.0.1", 0)) as server,
        assistant("--exporter", server.url) as connected,
    ):
        yield connected


def test_ranks_of_an_exporter(on_exporter: Assistant) -> None:
    """The list has NVML's index of the GPU, and what the exporter says threatens the rank."""
    text, data = on_exporter.answer("list_ranks")
    (row,) = data["ranks"]

    assert text.startswith(f"Ranks of {data['source']}\n")
    assert (row["run"], row["rank"], row["gpu"], row["total_bytes"]) == ("nightly", 3, 6, 80 * GIB)
    assert row["allocated_bytes"] < row["reserved_bytes"]
    assert f"rank 3 of run nightly, GPU 6: {row['verdict'][0]}" in text


def test_the_report_of_a_rank(on_exporter: Assistant) -> None:
    """The report has the facts, the threats, and after an OOM its advice, as in `torchmem top`."""
    text, data = on_exporter.answer("rank_report", rank=3)
    (device,) = data["devices"]
    words = " ".join(text.split())

    assert device["gpu"] == 6
    assert device["why"]["threats"][0]["text"] in words
    assert device["why"]["oom"]["advice"][0]["text"] in words
    assert "peaks 50.00 GiB allocated, 62.00 GiB reserved" in words


def test_what_holds_the_memory(on_exporter: Assistant) -> None:
    """The parts of the rank and those of its GPU are shown."""
    text, data = on_exporter.answer("what_holds_memory", run="nightly")
    (device,) = data["devices"]

    assert "Memory of the rank\n" in text
    assert "Memory of the GPU (80.00 GiB)\n" in text
    assert "optimizer_state" in {part["name"] for part in device["parts"]}


def test_the_last_oom_of_a_rank(on_exporter: Assistant) -> None:
    """The newest OutOfMemoryError is listed, and explained with its stack if the client may."""
    listed, data = on_exporter.answer("oom_reports")
    (report,) = data["reports"]
    text, answer = on_exporter.answer("explain_oom", rank=3)

    assert (report["run"], report["cause"]) == ("nightly", "fragmentation")
    assert "rank 3 of run nightly" in listed
    assert text.startswith("Fragmentation: 14.00 GiB (18% of the GPU) was free but stranded.")
    assert f"{report['headline']}." in listed
    assert f"{report['headline']}." in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert ("model.py:88" in text) != bool(answer["oom"].get("hidden"))


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("rank_report", {"rank": 9}, "matches; ranks: rank 3 of run nightly (pid "),
        ("explain_oom", {"rank": 9}, "has no OOM report of such a rank: call oom_reports."),
        ("explain_oom", {"file": "/x"}, "an exporter shows no files: pass `run` and `rank`"),
    ],
)
def test_a_rank_that_the_exporter_does_not_know(
    tool: str, arguments: dict[str, object], sentence: str, on_exporter: Assistant
) -> None:
    """The error names the ranks that there are."""
    assert sentence in on_exporter.error(tool, **arguments)


def test_an_exporter_that_is_away(tmp_path: Path) -> None:
    """While the exporter does not respond, every question about ranks says so, without a secret."""
    with assistant("--exporter", f"http://ann:secret@127.0.0.1:{free_port()}") as connected:
        for tool in ("list_ranks", "rank_report", "oom_reports"):
            error = connected.error(tool)
            assert "does not respond: " in error
            assert error.endswith("Start it: `torchmem exporter`.")
            assert "secret" not in error
        assert "does not exist" in connected.error("read_snapshot", file=str(tmp_path / "none"))
