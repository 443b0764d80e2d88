"""The report of a rank on the screen of `torchmem top`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.publishing import own_sample, publish
from support.words import rank_text

from torchmem.cli.exporter import ask_rank, read
from torchmem.cli.http import HttpAnswer
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.state import node_state
from torchmem.exporter.sample_files import RunDirectory
from torchmem.node import words
from torchmem.node.state import GpuState, RankState, RankWhy, encode
from torchmem.node.why import rank_why
from torchmem.top.reading import rank_lines


def test_it_is_that_of_torchmem_report(tmp_path: Path) -> None:
    """It has the lines of `torchmem why` for a running rank."""
    sample = own_sample()
    publish(tmp_path / "run", sample)
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path / "run"))
    exporter.collect()
    exporter.close()
    found = exporter.found()
    (item,), (device,) = found.published, sample.devices
    body = encode(rank_why(found, item, device, may_look=False))
    answer = ask_rank("http://x", "", "", lambda _: HttpAnswer(200, None, body))
    (gpu,) = read(encode(node_state(found))).gpus

    expected = rank_text(item.sample, found.time)
    assert answer is not None
    assert rank_lines(gpu, gpu.ranks[0], answer, found.time, words.WIDTH) == expected.splitlines()


@given(st.binary(max_size=200) | st.sampled_from([b"{}", b"[]", b'{"run": {"x": [1]}}']))
def test_other_answers(body: bytes) -> None:
    """What is not an answer is none, and an empty one has a page."""
    answer = ask_rank("http://x", "", "", lambda _: HttpAnswer(200, None, body))

    if answer is not None:
        assert rank_lines(GpuState(), RankState(), answer, time.time(), 80)


def test_a_chart_that_cannot_be_drawn() -> None:
    """Lines with fewer points than the chart are left out."""
    line = {"label": "allocated", "color": "in_use", "values": [1]}
    chart = {"title": "", "unit": "steps", "x": [1, 2], "total": None, "lines": [line]}
    body = json.dumps({"heading": ["run a"], "run": chart}).encode()
    answer = ask_rank("http://x", "", "", lambda _: HttpAnswer(200, None, body))

    assert isinstance(answer, RankWhy)
    assert answer.run is not None
    assert "whole run" not in "".join(rank_lines(GpuState(), RankState(), answer, None, 80))
