"""Recordings from the middle of a training: what is reported, and what PyTorch really does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from experiments.midrun.compare import EXPANDABLE, Truth, check, counted

from torchmem.trace import read
from torchmem.whatif.engine import what_if

pytestmark = pytest.mark.allocator

ESTIMATE_ERROR = 0.08
CASES = {
    "varying": ("ascending", "random:1"),
    "gpt": ("random:1",),
    "huggingface": ("descending",),
    "fsdp2": ("reuse",),
}
"""Workloads, and the orders of the driver's addresses that they are recorded under."""
SWITCHED = {"varying", "gpt"}
"""Workloads that are run once more with a switch, which takes time."""


@pytest.mark.parametrize("name", CASES)
def test_a_late_recording_gets_a_verdict_that_holds(name: str, tmp_path: Path) -> None:
    """Every allocation lands, a switch is exact, and a restart reserves about what is estimated."""
    if name == "huggingface" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed; run make test-allocator")
    switched = {}
    if name in SWITCHED:
        switched[EXPANDABLE] = counted(tmp_path / "switch", name, f"switch:{EXPANDABLE}", None)
    restarted = {EXPANDABLE: counted(tmp_path / "restart", name, "plain", None, conf=EXPANDABLE)}
    for addresses in CASES[name]:
        folder = tmp_path / addresses
        counted(folder, name, "record", None, addresses=addresses)
        (recording,) = read(folder / "snapshot.pickle")
        answer = what_if(recording, settings=[EXPANDABLE])
        checked = check(answer, Truth(switched, restarted))

        assert answer.fidelity.landed == answer.fidelity.allocations > 500
        assert answer.verdict.decision != "none"
        assert checked.refuted is None
        assert len(switched) == checked.switches == checked.exact_switches
        (error,) = checked.estimate_errors
        assert abs(error) <= ESTIMATE_ERROR
