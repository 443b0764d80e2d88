"""What a replay of a fragmented rank's own recording shows, beside its first advice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.publishing import own_process, publish
from support.recordings import RecordedJob, write
from support.threatened import LIVING

from torchmem.node.ranks import ProcessFilter
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.sample import Sample
from torchmem.simulator.gpu import CONTEXT_BYTES
from torchmem.why.local import LocalNode
from torchmem.why.node_answers import NodeTools

MIB = 1 << 20
GPU = 1200 * MIB + CONTEXT_BYTES
AGE = 180
FRAGMENTED = replace(LIVING["fragmentation"], timestamp=time.time())
Shown = Callable[..., str]


def stranding() -> RecordedJob:
    """Return a job in which long-lived tensors take half of each segment of larger ones."""
    job = RecordedJob(GPU)
    for block in [job.alloc(40 * MIB) for _ in range(24)]:
        assert block is not None
        job.free(block)
    for _ in range(24):
        job.alloc(21 * MIB)
    job.alloc(300 * MIB)
    return job


def flat() -> RecordedJob:
    """Return a job that no setting would have helped."""
    job = RecordedJob(GPU)
    job.alloc(400 * MIB)
    return job


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    """Return a function that writes a recording of a rank, and returns what is said about it."""

    def say(
        job: RecordedJob | None, suffix: str = OOM_RECORDING_SUFFIX, sample: Sample = FRAGMENTED
    ) -> str:
        now = time.time()
        file = publish(tmp_path, replace(sample, process=own_process(), timestamp=now))
        path = sibling_path(file, suffix)
        if job is None:
            path.write_bytes(b"\x80damaged")
        else:
            write(job.snapshot(), path)
        os.utime(path, (now - AGE, now - AGE))
        rank = NodeTools(LocalNode(tmp_path)).why(ProcessFilter())
        text = " ".join(rank.words().split())
        said = text[text.index("What to do") :] if "What to do" in text else text
        for word in ("A replay", "requests that failed", "shows no gain"):
            assert (word in said) == (word in rank.page().decode())
        return said

    return say


@pytest.mark.parametrize("suffix", [OOM_RECORDING_SUFFIX, SNAPSHOT_SUFFIX])
def test_a_replay_confirms_the_first_advice(shown: Shown, suffix: str) -> None:
    """The report, its page and its JSON say what the setting would have given, in one sentence."""
    said = shown(stranding(), suffix)

    first = said[: said.index(" 2. ")]
    assert "1. Enable expandable segments" in first
    assert (
        "A replay of its recording, 3 min 0 s old: Set expandable_segments:True: the requests that "
        "failed would have succeeded." in first
    )


def test_a_replay_shows_no_gain(shown: Shown) -> None:
    """Then that is said."""
    assert "3 min 0 s old: expandable_segments:True shows no gain." in shown(flat())


@pytest.mark.parametrize("kind", ["leak", "capacity"])
def test_other_threats_are_not_replayed(shown: Shown, kind: str) -> None:
    """A recording says nothing about a rank that fragmentation does not threaten first."""
    assert "replay" not in shown(stranding(), sample=LIVING[kind])


def test_a_recording_that_cannot_be_read(shown: Shown) -> None:
    """A damaged file is as none."""
    assert "replay" not in shown(None)
