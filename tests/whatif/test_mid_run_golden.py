"""Answers for captures of running trainings, compared with what PyTorch's allocator did."""

from __future__ import annotations

import lzma
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from support.recordings import write
from support.whatif_results import counts

from torchmem.simulator.blocks import block_order
from torchmem.trace import read
from torchmem.trace.recording import CaptureFacts, Recording
from torchmem.trace.worker import load
from torchmem.whatif.engine import what_if

GOLDEN = Path(__file__).parent / "golden" / "mid_run"
FILES = sorted(path.name for path in GOLDEN.glob("*.pickle.xz"))
ADDRESSES = ("ascending", "descending", "reuse", "random:1")
EXPANDABLE = "expandable_segments:True"
ESTIMATE_ERROR = 0.08
"""How far the estimate of a restart may be off."""
Counts = dict[str, int]


@cache
def golden(file: str) -> dict[str, Any]:
    """Return the content of a golden file of this repository."""
    content: dict[str, Any] = load(BytesIO(lzma.decompress((GOLDEN / file).read_bytes())))
    return content


@pytest.fixture(params=[(file, addresses) for file in FILES for addresses in ADDRESSES], ids=str)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Recording]:
    """The truth and one recording of a workload."""
    file, addresses = request.param
    path = write(golden(file)["snapshots"][addresses], tmp_path / "rank0.pickle")
    (recording,) = read(path)
    return golden(file), recording


def test_there_are_recordings_of_each_order_of_blocks() -> None:
    """PyTorch 2.11, 2.12 and 2.13 are among them."""
    versions = {file.removesuffix(".pickle.xz").rpartition("-")[2] for file in FILES}
    assert {block_order(version) for version in versions} == {"address", "block", "segment"}


def test_a_capture_is_reproduced(case: tuple[dict[str, Any], Recording]) -> None:
    """Every allocation gets its address, whatever the order of addresses and the version."""
    truth, recording = case
    order = block_order(recording.facts.torch_version)
    answer = what_if(recording, settings=())
    without_version = what_if(replace(recording, facts=CaptureFacts()), settings=())

    assert answer.fidelity.landed == answer.fidelity.allocations > 500
    assert answer.fidelity.block_order == order
    assert without_version.fidelity.landed == answer.fidelity.allocations
    assert without_version.fidelity.block_order in {order, None}
    expected = {name: truth["recorded"][name] for name in counts(answer.outcomes[0])}
    assert counts(answer.outcomes[0]) == expected


def test_a_switch_is_predicted_exactly(case: tuple[dict[str, Any], Recording]) -> None:
    """Peaks, retries, OOMs and driver calls are those of the real allocator."""
    truth, recording = case
    answer = what_if(recording, settings=list(truth["switched"]))
    is_address = block_order(recording.facts.torch_version) == "address"

    assert any("addresses of new memory" in caveat for caveat in answer.caveats) == is_address
    for replay in answer.outcomes[1:]:
        expected = truth["switched"][replay.conf]
        assert replay.start == "switched"
        if not is_address:
            assert {name: expected[name] for name in counts(replay)} == counts(replay)


def test_a_restart_with_expandable_segments_is_estimated(
    case: tuple[dict[str, Any], Recording],
) -> None:
    """The estimate is close to what a run from the start reserved, and the verdict right."""
    truth, recording = case
    answer = what_if(recording, settings=[EXPANDABLE, "max_split_size_mb:128"])
    expandable, *others = answer.restarts
    real, recorded = truth["restarted"][EXPANDABLE], truth["recorded"]
    saved = 1 - real["peak_reserved"] / recorded["peak_reserved"]

    assert expandable.peak_reserved is not None
    assert abs(expandable.peak_reserved / real["peak_reserved"] - 1) <= ESTIMATE_ERROR
    assert [None] * len(others) == [other.peak_reserved for other in others]
    if saved > 0.2:
        assert answer.verdict.decision == "change"
    split = next(each for each in answer.outcomes if each.conf == "max_split_size_mb:128")
    assert split.refused is not None
