"""The benchmark of verdicts: its jobs, and its figures."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest
from experiments.verdict.cures import TWINS, followed
from experiments.verdict.kinds import KINDS, PROGRAMS, SEEDS, UNKNOWN, cases
from experiments.verdict.score import Outcome, score

from torchmem.explain.remedy import Remedy
from torchmem.sample.sample import ONSETS, OOM_CAUSES

RIGHT = Outcome(
    kind="hook",
    seed=0,
    gpu_gib=4,
    steps=100,
    cause="capacity",
    onset="leak",
    headline="",
    advice="",
    causes=("capacity",),
    exact=("capacity",),
    onsets=("leak",),
    expandable=0.02,
    followed="VERDICT_CURE=drop",
    gained=None,
    line_right=True,
)
FRAGMENTED = replace(
    RIGHT,
    cause="fragmentation",
    onset="stranded",
    causes=("fragmentation",),
    exact=("fragmentation",),
    onsets=("stranded",),
    followed="PYTORCH_ALLOC_CONF=expandable_segments:True",
    gained=None,
    line_right=None,
)


def test_the_seeds_that_are_reported_are_others_than_those_used_for_tuning() -> None:
    """At least 100 jobs of 50 kinds are reported, and no seed is used twice."""
    assert len(KINDS) >= 50
    assert len(cases(SEEDS["report"])) >= 100
    assert not set(SEEDS["tune"]) & set(SEEDS["report"])


def test_every_kind_has_a_program_and_a_truth() -> None:
    """Each kind names a function, causes and onsets that exist."""
    for kind in KINDS:
        body = ast.parse((PROGRAMS / f"{kind.program}.py").read_text(encoding="utf-8")).body
        assert kind.function in {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert kind.onsets
        assert kind.onsets <= {*ONSETS, UNKNOWN}
        assert kind.causes
        assert kind.causes <= set(OOM_CAUSES)


def test_every_leak_has_a_guilty_line() -> None:
    """Each program that keeps tensors marks the line that allocates them."""
    assert all(kind.guilty for kind in KINDS if kind.onsets == {"leak"})


def test_figures_count_what_is_right_of_what_could_be() -> None:
    """Lines count where one is guilty, and settings where one was advised."""
    found = score([RIGHT, replace(RIGHT, onset="tight", line_right=False), FRAGMENTED])

    assert found.cause == (3, 3)
    assert found.onset == found.both == (2, 3)
    assert found.line == (1, 2)
    assert found.setting == (1, 1)
    assert found.missed == (0, 1)


def test_a_setting_in_vain_and_missed_fragmentation_are_counted() -> None:
    """A setting that gains less than a tenth is not worth it, and fragmentation can be missed."""
    vain = replace(FRAGMENTED, causes=("capacity",), gained=0.09)
    found = score([vain, replace(FRAGMENTED, cause="capacity")])

    assert found.setting == (1, 2)
    assert found.missed == (1, 1)


def test_advice_is_the_cure_if_the_job_lasts_twice_as_long_with_it() -> None:
    """Code changes count too; advice that does nothing, or none, is no cure."""
    half, none = replace(RIGHT, gained=0.5), replace(RIGHT, followed="", gained=0.0)

    assert score([RIGHT, FRAGMENTED, half, none]).cure == (2, 4)


def test_advice_is_followed_by_its_setting_or_by_the_twin_of_its_kind() -> None:
    """Advice without a twin is an error."""
    expandable = Remedy(setting="expandable_segments", value="True")
    fraction = Remedy(lines=("torch.cuda.set_per_process_memory_fraction(0.55, 0)",))

    assert followed(None) == {}
    assert followed(expandable) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert followed(fraction) == {"VERDICT_FRACTION": "0.55"}
    assert followed(Remedy("smaller_batch")) == {"VERDICT_CURE": "smaller"}
    with pytest.raises(LookupError, match="sent SIGKILL"):
        followed(Remedy("signal", "Find out who sent SIGKILL."))


def test_every_twin_of_a_script_follows_advice() -> None:
    """No script has a twin that no advice leads to."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in PROGRAMS.glob("*.py"))
    twins = {
        name
        for call in re.findall(r"cured\((.*?)\)", scripts)
        for name in re.findall(r'"(\w+)"', call)
    }

    assert twins
    assert twins <= set(TWINS.values())
