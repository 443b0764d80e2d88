"""A small version of `experiments.quiet_fleet`: a healthy day is quiet, and faults are told.

Real exporter and real processes over a fake NVML, and Prometheus' rule engine; only time is
simulated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.quiet_fleet.composition import MISSED, Composer, notation
from experiments.quiet_fleet.evaluation import fired, metrics_read
from experiments.quiet_fleet.faults import FAULTS, play, told
from experiments.quiet_fleet.fleet import Fleet, Placed, Planner
from experiments.quiet_fleet.recordings import DAY_MINUTES, Workload

TOLD = (
    "a neighbor that grows",
    "a killed rank",
    "an XID error",
    "a lost GPU",
    "another node that is down",
)


def small_fleet() -> Fleet:
    """Return a day of four nodes with what most often looks like a fault."""
    fleet = Fleet(1, ["train", "lab", "serve", "spare"])
    training = Workload("stable", 1, hours=1.0)
    for rank in (0, 1):
        # A rank fails, and torchrun starts all of them again.
        fails = Workload("stable", 1, "killed" if rank else "failed", 1.0)
        first = Placed(fails, "train", rank, 60, 4, "gpt", "1000-1", rank, 10 + rank)
        again = Placed(training, "train", rank, 241, 20, "gpt", "1000-1", rank, 20 + rank)
        fleet.placed += [first, again]
    lab = [
        (Workload("search", 1, "killed", 1.0), 600, "search"),
        (Workload("stable", 2, "failed", 0.1), 700, "typo"),
        (Workload("notebook", 1, share=0.2), 0, ""),
    ]
    for gpu, (workload, start, run) in enumerate(lab):
        launch = f"1001-{gpu}" if run else ""
        fleet.placed.append(Placed(workload, "lab", gpu, start, 0, run, launch, 0, 30 + gpu))
    for gpu, (kind, share) in enumerate((("vllm", 0.92), ("triton", 0.98))):
        workload = Workload(kind, 1, share=share)
        fleet.placed.append(Placed(workload, "serve", gpu, 0, 0, "", "", 0, 40 + gpu))
    fleet.outages += [
        ("reboot", "spare", 300, 9),
        ("driver", "spare", 400, 6),
        ("gap", "train", 500, 1),
        ("prometheus", "", 900, 3),
    ]
    return fleet


@pytest.mark.stack
def test_a_quiet_day_has_nothing_urgent(tmp_path: Path) -> None:
    """A batch-size search and a notebook left open are told as info, the rest not at all."""
    fleet = small_fleet()
    series = Composer(fleet, tmp_path, metrics_read()).series(fleet.nodes, (0, DAY_MINUTES), 2)

    found = fired(series, DAY_MINUTES, tmp_path, counted=DAY_MINUTES, step=120)

    assert {(each.severity, each.alert) for each in found} == {
        ("info", "TorchmemOutOfMemory"),
        ("info", "TorchmemGpuIdle"),
    }


@pytest.mark.stack
def test_faults_are_told_in_time(tmp_path: Path) -> None:
    """Each within the time that its alert waits, and nothing fires before."""
    places = [place for place, fault in enumerate(FAULTS) if fault.name in TOLD]

    found = told([play(place, 1) for place in places], tmp_path)

    assert [each for each in found if not each.in_time or each.before] == []
    assert {each.fault for each in found} == set(TOLD)


def test_values_that_repeat_are_left_out_between_evaluations() -> None:
    """What Prometheus did not scrape is missing, and what a scrape lacks has ended."""
    values = np.array([1, 1, 1, 1, 2, np.nan, np.nan, 3, 3, MISSED, MISSED, 3])

    assert notation(values) == "1x3 2 stale _x1 3x1 _x2 3"
    assert notation(values, 2) == "1 _ 1 _ 2 stale _x1 3 3 _x2 3"


def test_equal_seeds_draw_equal_fleets() -> None:
    """A fleet has 416 GPUs, and follows from its seed."""
    fleet = Planner(1, 2).plan()

    assert fleet == Planner(1, 2).plan()
    assert fleet != Planner(2, 2).plan()
    assert len(fleet.nodes) == 52
