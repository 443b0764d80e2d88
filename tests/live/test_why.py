"""Why a rank's memory is as it is, in words, and who may see the call stack."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reports, samples
from support.publishing import own_sample, publish

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.explain.oom_report import OomReport, encode
from torchmem.explain.thresholds import changed
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import ExporterSettings
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.state import node_state
from torchmem.exporter.main import reload
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.reading import Reading
from torchmem.exporter.sample_files import RunDirectory
from torchmem.node.published import Published
from torchmem.node.state import OomWhy, RankWhy
from torchmem.node.state import encode as encode_document
from torchmem.node.why import oom_why, rank_why
from torchmem.sample.run_directory import report_name
from torchmem.sample.sample import Ending, Sample

NODE = FakeNvml.of(*(FakeGpu(GpuIdentity(index, f"GPU-{index}")) for index in range(4)))


def published(run_dir: Path, sample: Sample, report: OomReport | None = None) -> Path:
    """Write a sample, and an OOM report beside it."""
    path = publish(run_dir, sample)
    if report is not None:
        path.with_name(report_name(path.name, 1)).write_bytes(encode(report))
    return path


def ask(run_dir: Path, nvml: FakeNvml | None = None, *, may_look: bool = False) -> RankWhy:
    """Return the words about the only rank of the run directory."""
    exporter = Exporter(nvml or FakeNvml.of(), RunDirectory(run_dir))
    exporter.collect()
    exporter.close()
    (item,) = exporter.found().published
    return rank_why(exporter.found(), item, item.sample.devices[0], may_look=may_look)


@pytest.mark.parametrize("may_look", [False, True])
def test_only_the_owner_sees_the_stack(tmp_path: Path, may_look: bool) -> None:
    """Others learn that there is more; the report's cause and advice are for everybody."""
    published(tmp_path / "run", own_sample(), reports.STRANDED)
    why = ask(tmp_path / "run", may_look=may_look)

    assert isinstance(why.oom, OomWhy)
    assert "Fragmentation" in why.oom.summary
    assert why.oom.advice
    text = "\n".join(line for each in why.oom.listings for line in (each.title, *each.lines))
    private = ("MLP.forward", "Where the memory was requested", "Lines that held the most memory")
    assert [words in text for words in private] == [may_look] * len(private)
    assert why.oom.hidden is (None if may_look else True)
    assert (b"/home/ann" in encode_document(why)) is may_look


def test_a_running_rank(tmp_path: Path) -> None:
    """It says what holds the memory, whether the next allocation succeeds, and what threatens."""
    published(tmp_path / "run", own_sample())
    why = ask(tmp_path / "run")

    assert why.holds is not None
    assert why.holds.startswith("16.00 GiB optimizer state")
    assert why.next_request is not None
    assert "a larger one fails" in why.next_request
    assert any("expandable_segments" in line for item in why.advice for line in item.lines)
    assert why.ending is None
    assert why.oom is None
    assert why.run is not None
    assert tuple(why.run.x) == (1, 5, 10)
    assert [threat.onset for threat in why.threats[:2]] == [None, "leak"]
    assert [threat.cause for threat in why.threats[:2]] == ["fragmentation", "capacity"]


def test_the_thresholds_of_the_user(tmp_path: Path) -> None:
    """Changed thresholds are in force in the state, which `top` shows too, and in the words."""
    published(tmp_path / "run", own_sample())
    content = {"overrides": [{"match": {"run": "night"}, "stranded_bytes": "70GiB"}]}
    exporter = Exporter(
        FakeNvml.of(),
        RunDirectory(tmp_path / "run"),
        thresholds=changed({"fragmentation_ratio": 0.9, **content}, "a file"),
    )
    exporter.collect()
    exporter.close()
    found = exporter.found()
    (rank,) = node_state(found).gpus[0].ranks
    (item,) = found.published
    why = rank_why(found, item, item.sample.devices[0], may_look=False)

    assert rank.fragmentation_ratio is not None
    assert 0.7 < rank.fragmentation_ratio < 0.9
    assert not rank.has_severe_fragmentation
    assert "fragmentation" not in {item.cause for item in (*rank.why, *why.threats)}


def test_a_reload_applies_new_thresholds(tmp_path: Path) -> None:
    """New thresholds apply at a reload; a file that cannot be used leaves the old ones."""
    published(tmp_path / "run", own_sample())
    file = tmp_path / "thresholds.yml"
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path / "run"))
    settings = ExporterSettings(run_dir=tmp_path / "run", thresholds=file)

    def severe(text: str) -> bool:
        file.write_text(text)
        reload(exporter, settings, lambda: settings)
        exporter.collect()
        return node_state(exporter.found()).gpus[0].ranks[0].has_severe_fragmentation

    assert [
        severe("fragmentation_ratio: 0.9"),
        severe("fragmentation_ratio: 9"),
        severe("fragmentation_ratio: 0.5"),
    ] == [False, False, True]
    exporter.close()


def test_severe_fragmentation(tmp_path: Path) -> None:
    """The state says where the index is above the shipped threshold."""
    published(tmp_path / "run", own_sample())
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path / "run"))
    exporter.collect()
    exporter.close()

    assert node_state(exporter.found()).gpus[0].ranks[0].has_severe_fragmentation


@pytest.mark.parametrize(
    ("ended", "words"),
    [("oom", "died of an OutOfMemoryError"), ("failed", "exception"), ("exited", "ended normally")],
)
def test_a_rank_that_has_ended(tmp_path: Path, ended: Ending, words: str) -> None:
    """It says how, on the rank's line too; nothing threatens it any more."""
    published(tmp_path / "run", own_sample(ended=ended, timestamp=time.time()))
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path / "run"))
    exporter.collect()
    exporter.close()
    (gpu,) = node_state(exporter.found()).gpus
    why = ask(tmp_path / "run")

    assert words in (why.ending or "")
    assert gpu.ranks[0].why[0].text == why.ending
    assert why.threats == ()
    assert why.next_request is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 10_000, b"\xff" * 70_000])
def test_a_report_that_cannot_be_used(tmp_path: Path, content: bytes) -> None:
    """A report that is invalid or too large costs only itself."""
    path = published(tmp_path / "run", own_sample())
    path.with_name(report_name(path.name, 3)).write_bytes(content)

    assert ask(tmp_path / "run").oom is None


def test_a_report_that_is_a_link(tmp_path: Path) -> None:
    """A link in the place of a report is not followed."""
    path = published(tmp_path / "run", own_sample(), reports.STRANDED)
    report = path.with_name(report_name(path.name, 1))
    report.rename(tmp_path / "elsewhere")
    report.symlink_to(tmp_path / "elsewhere")

    assert ask(tmp_path / "run").oom is None


@given(reports.reports, st.none() | st.integers(0, 7), st.booleans())
def test_every_valid_report_has_words(report: OomReport, gpu: int | None, may_look: bool) -> None:
    """Whatever a report says, its words can be encoded."""
    assert encode_document(oom_why(report, gpu, may_look=may_look))


def test_the_gpu_has_nvmls_index(tmp_path: Path) -> None:
    """Rank 3, whose process calls its only GPU cuda:0, ran out of memory on GPU 3."""
    device = replace(own_sample().devices[0], uuid="GPU-3")
    report = replace(reports.STRANDED, device=replace(reports.STRANDED.device, uuid="GPU-3"))
    published(tmp_path / "run", own_sample(devices=(device,)), report)

    oom = ask(tmp_path / "run", NODE).oom
    assert oom is not None
    assert " on GPU 3." in oom.reason
    oom = ask(tmp_path / "run").oom
    assert oom is not None
    assert " on cuda:0." in oom.reason


@given(samples.samples)
def test_every_valid_sample_has_a_state(sample: Sample) -> None:
    """Whatever samples say, parts add up and the document can be encoded."""
    item = Published(sample, sample.process.pid, "running", attributed=True)
    state = node_state(NodeReading(0.0, [item], reading=Reading(FakeNvml.of())))

    assert encode_document(state)
    for gpu in state.gpus:
        known = sum(part.bytes for part in gpu.parts)
        is_known = any(part.name == "free" for part in gpu.parts)
        assert known == (gpu.total_bytes or 0) or (known < (gpu.total_bytes or 0) and not is_known)
