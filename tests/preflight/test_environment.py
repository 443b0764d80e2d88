"""The environment of the script: everything it needs, and nobody else's is touched."""

from __future__ import annotations

import pytest

from torchmem.phantom.cards import parse_card
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.run import run_label


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (("python", "src/train.py", "--x", "y.py"), "train (phantom)"),
        (("python", "-m", "package.train"), "python (phantom)"),
    ],
)
def test_the_run_is_labelled_phantom(command: tuple[str, ...], label: str) -> None:
    """Whoever sees it on a dashboard sees what it is."""
    assert run_label(RunPlan(command, parse_card("80GB"))) == label


def test_a_placement_is_what_torchrun_gives() -> None:
    """Rank 11 of 16 on nodes of 8 is local rank 3 of the second node."""
    given = Placement(11, 16, 8).environment()
    wanted = {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
    }
    assert {name: given[name] for name in wanted} == wanted
