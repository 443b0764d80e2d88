"""Predictions are compared with PyTorch's own allocator, run under the predicted settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.phantom import run_on_phantom
from support.whatif_results import counts

from torchmem.allocator.sizes import MIB
from torchmem.trace import read
from torchmem.whatif.engine import what_if
from torchmem.whatif.result import WhatIf

pytestmark = pytest.mark.allocator

SCRIPT = Path(__file__).with_name("recorded_program.py")
GPU_BYTES = 1536 * MIB
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
"""The recorded setting, and what the program uses; with "ooms" it continues after its first OOM."""
Counts = dict[str, int]


def run(folder: Path, conf: str, *arguments: str) -> Counts:
    """Run the program under a setting and return its statistics."""
    done = run_on_phantom(
        SCRIPT,
        *arguments,
        memory=GPU_BYTES,
        state=folder,
        environment={"PYTORCH_CUDA_ALLOC_CONF": conf},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts: Counts = json.loads(done.stdout.splitlines()[-1])
    return counts


def predict(folder: Path, confs: tuple[str, ...]) -> WhatIf:
    """Return the answer for the recorded snapshot."""
    (recording,) = read(folder / "snapshot.pickle")
    gpu_bytes = GPU_BYTES - CONTEXT_BYTES
    return what_if(recording, gpu_bytes=gpu_bytes, total_bytes=GPU_BYTES, settings=confs)


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_what_pytorch_does(case: str, tmp_path: Path) -> None:
    """A trace predicts peaks, retries, OOMs and driver calls under other settings, to the byte."""
    conf, features = CASES[case]
    recorded = run(tmp_path, conf, "record", str(tmp_path), "1", "3000", *features)
    answer = predict(tmp_path, CONFS)

    assert answer.fidelity.share == 1.0
    assert recorded == counts(answer.outcomes[0])
    assert recorded["retries"]
    for replay in answer.outcomes[1:]:
        assert replay.refused is None
        real = run(tmp_path, replay.conf, "again", str(tmp_path))
        assert (replay.conf, real) == (replay.conf, counts(replay))


def test_a_recording_with_waits_for_other_streams_is_reproduced(tmp_path: Path) -> None:
    """Blocks that wait for another stream become free when they did in the recording."""
    run(tmp_path, "", "record", str(tmp_path), "2", "4000", "streams", "events")
    answer = predict(tmp_path, ("expandable_segments:True",))

    assert answer.fidelity.share == 1.0
    assert answer.fidelity.block_order in {"segment", None}
