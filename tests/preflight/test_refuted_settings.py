"""The advice after an OOM agrees with the comparison of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support.whatif_results import KEEP

from torchmem.preflight.comparison import PreflightComparison
from torchmem.preflight.report import PreflightReport, refuted_settings
from torchmem.preflight.verdict import FitVerdict
from torchmem.whatif.result import FailedRequest, ReplayResult

OOM = FailedRequest(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("replays", "refuted"),
    [
        ([ReplayResult("a", "expandable_segments:True", oom=OOM)], {"expandable_segments"}),
        ([ReplayResult("a", "expandable_segments:True")], set()),
        ([ReplayResult("a", "expandable_segments:True", refused="No.")], set()),
        (
            [
                ReplayResult("a", "roundup_power2_divisions:2"),
                ReplayResult("b", "roundup_power2_divisions:8", oom=OOM),
            ],
            set(),
        ),
        ([], set()),
    ],
)
def test_a_setting_that_fails_in_every_replay_is_refuted(
    replays: list[ReplayResult], refuted: set[str]
) -> None:
    """A setting is refuted if the run also fails with each of its values that was tried."""
    comparison = PreflightComparison(replace(KEEP, outcomes=tuple(replays)), ())
    unused = cast("Any", None)
    report = PreflightReport(unused, unused, FitVerdict(False, ""), comparison=comparison)

    assert refuted == refuted_settings(report)
    assert refuted_settings(replace(report, comparison=None)) == frozenset()
