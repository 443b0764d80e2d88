"""The yardstick of predictions: its PromQL, its arithmetic, and that its results are current."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.prediction.candidates import (
    BEFORE,
    PLAN_ALERT,
    normalized,
    shipped,
    without_earlier_runs,
)
from experiments.prediction.jobs import before, job
from experiments.prediction.prometheus import disagreement
from experiments.prediction.promql import Evaluation
from experiments.prediction.recordings import (
    EARLIER_PID,
    SCRAPE_SECONDS,
    Recording,
    recording,
    with_earlier,
)
from experiments.prediction.yardstick import (
    Rule,
    fires_in_job,
    firing,
    outcome,
    plan_score,
    score,
)

from torchmem.manifests.prediction import measured, planned_worth, worth

LABELS = frozenset({("rank", "0")})


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A short job that runs out of memory."""
    return recording(job("curriculum grows", 104), tmp_path_factory.mktemp("prediction"))


def of(*values: float) -> Recording:
    """Return a job with one series, `margin`, that died at its last scrape."""
    series = {"margin": {LABELS: np.array(values, dtype=float)}}
    return Recording(series, len(values), len(values) - 1)


def fires(rule: Rule, job: Recording) -> list[int]:
    """Return the scrapes at which a rule fires."""
    return [int(number) for number in np.flatnonzero(fires_in_job(rule, job))]


@pytest.mark.stack
@pytest.mark.parametrize(
    "rule", [shipped(), shipped(PLAN_ALERT), BEFORE], ids=["shipped", "plan", "first"]
)
def test_prometheus_fires_at_the_same_scrapes(rule: Rule, dying: Recording) -> None:
    """Prometheus' own rule engine agrees with the evaluation at every scrape of a job."""
    expected = firing(rule, Evaluation(dying.series, dying.scrapes))

    assert disagreement(rule, dying, expected) == ""
    assert any(when.any() for when in expected.values())
    otherwise = {labels: ~when for labels, when in expected.items()}
    assert disagreement(rule, dying, otherwise) != ""


@pytest.mark.stack
def test_prometheus_compares_with_earlier_runs(tmp_path: Path) -> None:
    """Where an earlier run silences a warning, Prometheus' own rule engine is silent too."""
    made = job("waves", 201)
    recorded, rule = with_earlier(made, tmp_path), shipped()

    expected = firing(rule, Evaluation(recorded.series, recorded.scrapes))
    assert disagreement(rule, recorded, expected) == ""
    assert not fires_in_job(rule, recorded).any()
    assert fires_in_job(without_earlier_runs(rule), recorded).any()


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("margin offset 10s", [np.nan, 5, 4, np.nan]),
        ("min_over_time(margin[20s])", [5, 4, 4, 3]),
        ("max_over_time(margin[30s])", [5, 5, 5, 5]),
        ("last_over_time(margin[10s] offset 10s)", [np.nan, 5, 4, 4]),
        ("deriv(margin[10s])", [np.nan, -0.1, np.nan, np.nan]),
        ("clamp_min(margin - 4, 0) / 2", [0.5, 0, np.nan, 0]),
        ("margin > 3 or margin * 10", [5, 4, np.nan, 30]),
        ("margin > 3 unless margin > 4", [np.nan, 4, np.nan, np.nan]),
        ("max without (rank) (margin < bool 5)", [0, 1, np.nan, 1]),
        ("margin and on (rank) margin < 5", [np.nan, 4, np.nan, 3]),
    ],
)
def test_expressions_have_the_values_of_prometheus(expression: str, values: list[float]) -> None:
    """Offsets, ranges, comparisons and sets follow PromQL, also where a value is absent."""
    evaluation = Evaluation(of(5, 4, np.nan, 3).series, 4)
    (result,) = evaluation.vector(expression).values()
    np.testing.assert_allclose(result, values)


def test_a_slow_rule_keeps_its_value_until_the_next_evaluation() -> None:
    """A group with an interval of its own is evaluated at its multiples only."""
    evaluation = Evaluation(of(5, 4, np.nan, 3).series, 4)
    evaluation.record("slow", "margin * 1", {}, interval=2)

    (kept,) = evaluation.vector("slow + 0").values()
    np.testing.assert_array_equal(kept, [5, 5, np.nan, np.nan])


def test_what_is_not_implemented_is_an_error() -> None:
    """A function or a duration that cannot be evaluated raises, and is not ignored."""
    evaluation = Evaluation(of(1, 2).series, 2)
    for expression in ("stddev(margin)", "rate(margin[1m])", "margin offset 15s"):
        with pytest.raises(NotImplementedError):
            evaluation.vector(expression)


def test_an_alert_waits_and_goes_on() -> None:
    """An alert fires once its condition has held, and for a while after it has ended."""
    low = of(9, 1, 1, 9, 1, 1, 1, 9, 9, 9, 1)

    assert fires(Rule("", "margin < 5", 10), low) == [2, 5, 6]
    assert fires(Rule("", "margin < 5", 20), low) == [6]
    assert fires(Rule("", "margin < 5", 20, keep_seconds=20), low) == [6, 7, 8]


def test_a_warning_counts_if_it_comes_in_time() -> None:
    """A job is told by a warning in the hour before its end, and until 2 or 10 minutes before."""
    died = 720
    for fired, told in ((300, (False, False)), (640, (True, True)), (700, (True, False))):
        when = np.zeros(died + 1, dtype=bool)
        when[fired] = True
        result = outcome("leak", "growing", of(*[1.0] * (died + 1)), when)
        assert (told, 1, int(fired > 360)) == (result.told, result.starts, result.true_starts)


def test_false_alarms_are_counted_in_healthy_hours() -> None:
    """Each start of an alert in a job that did not die is a false alarm."""
    healthy = Recording(of(*[1.0] * 360).series, 360, None)
    when = np.zeros(360, dtype=bool)
    when[[10, 11, 50]] = True
    stopped = outcome("leak stops", "stops", healthy, when)
    quiet = outcome("stable", "flat", healthy, np.zeros(360, dtype=bool))

    result = score("rule", [stopped, quiet])

    assert (
        result.false_alarms,
        result.false_alarms_flat,
        result.false_alarms_stops,
    ) == (100.0, 0.0, 200.0)
    assert (result.healthy_hours, result.came_true) == (2.0, 0.0)


def test_a_warning_of_a_planned_batch_counts_however_early() -> None:
    """A warning comes true in any job that dies; the kinds are counted until 2 minutes before."""
    when = np.zeros(721, dtype=bool)
    when[120:] = True
    early = outcome("tail", "sudden", of(*[1.0] * 721), when)
    late = outcome("tail", "sudden", of(*[1.0] * 125), when[:125])
    healthy = Recording(of(*[1.0] * 360).series, 360, None)
    wrong = outcome("stable", "flat", healthy, when[:360])

    result = plan_score([early, late, wrong], ["tail", "spike"])

    assert (result.warned, result.by_kind) == (3, {"tail": (1, 2), "spike": (0, 0)})
    assert pytest.approx(2 / 3) == result.came_true
    assert result.false_alarms == 100.0
    assert pytest.approx((6000 + 40) / 2 / 60) == result.minutes_ahead


def test_a_job_is_the_same_each_time(tmp_path: Path, dying: Recording) -> None:
    """Kind and seed determine every value that a rule reads, and the end."""
    again = recording(job("curriculum grows", 104), tmp_path)

    assert dying.died == again.died is not None
    for name in (
        "torchmem_active_peak_bytes",
        "torchmem_driver_free_bytes",
        "torchmem_free_bytes",
        "torchmem_largest_allocated_block_bytes",
        "torchmem_planned_peak_bytes",
    ):
        for labels, values in dying.series[name].items():
            np.testing.assert_array_equal(values, again.series[name][labels])


def test_an_earlier_run_comes_before_the_job_on_its_node(tmp_path: Path) -> None:
    """Its series have another pid and the labels of the job, end as it ended, and do not count."""
    made = job("waves", 201)
    earlier = before(made)
    recorded, alone = with_earlier(made, tmp_path), recording(made, tmp_path)
    assert earlier.job is not None
    other = recording(earlier.job, tmp_path)

    own, old = sorted(
        recorded.series["torchmem_steps_total"].items(), key=lambda each: ("pid", "999") in each[0]
    )
    assert dict(own[0]) | {"pid": EARLIER_PID} == dict(old[0])
    assert recorded.begins == other.scrapes + round(earlier.pause_seconds / SCRAPE_SECONDS)
    assert alone.hours == recorded.hours
    assert np.isnan(own[1][: recorded.begins]).all()
    (steps,) = alone.series["torchmem_steps_total"].values()
    np.testing.assert_array_equal(own[1][recorded.begins :], steps)


def test_runs_with_the_same_parameters_differ_as_runs_do() -> None:
    """Before a job runs nothing, the same with another course, or another job of what it grows."""
    found = {}
    for seed in range(20):
        made = job("leak stops", seed)
        earlier = before(made)
        found[earlier.likeness] = earlier.job
        if earlier.likeness == "same":
            assert earlier.job is not None
            assert made.scenario.gpu_bytes == earlier.job.scenario.gpu_bytes
            assert made.scenario.name != earlier.job.scenario.name

    assert found.keys() == {"first", "same", "changed"}
    assert found["first"] is None
    assert found["changed"] is not None
    assert found["changed"].kind in {"leak grows", "leak stops"}


def test_the_results_are_those_of_the_shipped_rule() -> None:
    """After a change of the rule, the yardstick must be run again: `--write`."""
    results = measured()

    assert normalized(shipped()) + normalized(shipped(PLAN_ALERT)) == results["expressions"]
    assert results["seeds"][0] >= 500
    assert f"{results['plan']['came_true']:.0%}"[:-1] in planned_worth()
    came_true = f"{results['rules'][0]['came_true']:.0%}"[:-1]
    assert f"{came_true} of 100 such warnings came true" in worth()
