"""The verdict on jobs that run out of memory on PyTorch's real allocator, see docs/verdict.md."""

from __future__ import annotations

import pytest
from experiments.verdict.kinds import KINDS, Case, Kind
from experiments.verdict.runs import run

pytestmark = pytest.mark.allocator

FAST = {
    "outputs_in_a_list",
    "longer_batches",
    "long_batch",
    "without_no_grad",
    "optimizer_state",
    "fraction_in_first_step",
    "neighbor_grows",
    "shuffled_buffers",
}


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.function in FAST], ids=lambda kind: str(kind.function)
)
def test_the_verdict_names_cause_and_onset(kind: Kind) -> None:
    """The verdict on a job whose end is known names its cause and its onset."""
    verdict = run(Case(kind, seed=0)).document

    assert verdict["cause"] in kind.causes
    assert verdict["onset"] in kind.onsets
