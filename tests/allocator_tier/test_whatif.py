"""What torchmem says would have happened is what happens: PyTorch's own allocator is then run under those settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.recording import read
from torchmem.whatif.engine import what_if
from torchmem.whatif.result import ReplayResult, WhatIf

pytestmark = pytest.mark.allocator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CARD_BYTES = 1536 * MIB
CONTEXT_BYTES = 512 * MIB
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:48,roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5",
)
CASES = {
    "default": ("", ()),
    "default-pools": ("", ("streams", "pools", "ooms")),
    "expandable": ("expandable_segments:True", ("streams",)),
    "expandable-pools": ("expandable_segments:True", ("pools",)),
    "max_split": ("max_split_size_mb:64", ("ooms",)),
}
"""The setting of the recording, and what the program does besides: until it runs out of memory, or on after that."""
Counts = dict[str, int]


def run(state: Path, conf: str, *script: str, card: int = CARD_BYTES) -> Counts:
    """Run a script of ours on a card of its own; the statistics that it prints."""
    phantom = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--memory",
        str(card),
        "--state",
        str(state),
        "--",
    ]
    done = subprocess.run(
        [*phantom, sys.executable, "-W", "ignore", *script],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-2000:]
    counts: Counts = json.loads(done.stdout.splitlines()[-1])
    return counts


def ask(snapshot: Path, confs: tuple[str, ...], card: int = CARD_BYTES) -> WhatIf:
    """What torchmem says of a snapshot."""
    (recording,) = read(snapshot)
    return what_if(recording, card_bytes=card - CONTEXT_BYTES, total_bytes=card, settings=confs)


def told(outcome: ReplayResult) -> Counts:
    """The foretold statistics."""
    names = ("peak_reserved", "peak_allocated", "retries", "ooms", "device_allocs", "device_frees")
    return {name: getattr(outcome, name) for name in names}


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_what_pytorch_does(case: str, tmp_path: Path) -> None:
    """A trace recorded under one setting foretells peaks, retries, OOMs and driver calls under others, to the byte."""
    recorded, words = CASES[case]
    script = str(HERE / "recorded_program.py")
    was = run(tmp_path, recorded, script, "record", str(tmp_path), "1", "3000", *words)
    answer = ask(tmp_path / "snapshot.pickle", CONFS)

    assert 1.0 == answer.fidelity.share
    assert was == told(answer.outcomes[0])
    assert was["retries"]
    for outcome in answer.outcomes[1:]:
        assert outcome.refused is None
        assert (outcome.conf, run(tmp_path, outcome.conf, script, "again", str(tmp_path))) == (
            outcome.conf, told(outcome))  # fmt: skip


def test_a_recording_with_waits_for_other_streams_is_repeated(tmp_path: Path) -> None:
    """Blocks that wait for another stream become free when they did, and every allocation lands."""
    run(
        tmp_path,
        "",
        str(HERE / "recorded_program.py"),
        "record",
        str(tmp_path),
        "2",
        "4000",
        "streams",
        "events",
    )
    answer = ask(tmp_path / "snapshot.pickle", ("expandable_segments:True",))

    assert 1.0 == answer.fidelity.share
    assert answer.fidelity.oldest_segment_first is not False
