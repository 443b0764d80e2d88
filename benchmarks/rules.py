"""Compare the time that all rules take with that of other rules, in one run on the same fleet.

    PYTHONPATH=tests python -m benchmarks.rules --before DIR

Needs Prometheus on PATH. DIR has the other rules, such as those of an earlier commit:

    mkdir DIR; git archive COMMIT prometheus/rules | tar -x --strip-components 2 -C DIR

Three Prometheus servers scrape the same simulated fleet (see benchmarks.fleet): one with each set
of rules, and one without rules. What rules cost is the difference in CPU time, which includes what
their results cost the database. The time of a rule is the minimum of Prometheus' own evaluation
times. Both are per scrape interval: a group that is evaluated half as often counts half. Other work
on the machine slows down all of them, so the ratio is what counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cluster.serve import GPUS, INTERVAL
from benchmarks.cluster.watching import RULES, Watcher, exporters, scraping

NONE = "no rules"
READS = 40
MAX_LISTED = 15


def main() -> None:
    """Measure and print both sums, and the most expensive rules of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, metavar="DIR")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--speed", type=float, default=4)
    parser.add_argument("--seconds", type=float, default=180)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder, speed = Path(temporary), arguments.speed
        sides = {NONE: folder / "none", "before": arguments.before, "after": RULES}
        server = stack.enter_context(exporters(folder, speed, "healthy"))
        watchers = {}
        for side, rules in sides.items():
            url = scraping(folder / side, server, arguments.nodes, speed, rules)
            watchers[side] = Watcher(stack.enter_context(url), speed)
        time.sleep(arguments.seconds / 2)
        before, started = _cpu(watchers), time.monotonic()
        least = _measured(watchers, arguments.seconds / 2)
        intervals = (time.monotonic() - started) * speed / INTERVAL
        spent = {side: (used - before[side]) / intervals for side, used in _cpu(watchers).items()}
        gpus = arguments.nodes * GPUS
        _show_cpu(spent, gpus)
        _show({side: rules for side, rules in least.items() if side != NONE}, gpus)


def _cpu(watchers: Mapping[str, Watcher]) -> dict[str, float]:
    """Return CPU seconds by server."""
    return {
        side: watcher.own()["process_cpu_seconds_total"][""] for side, watcher in watchers.items()
    }


def _show_cpu(spent: Mapping[str, float], gpus: int) -> None:
    rules = {side: used - spent[NONE] for side, used in spent.items() if side != NONE}
    for side, used in rules.items():
        at_thousand = used / gpus * 1000
        print(
            f"{side}: {used:.3f} CPU s per interval at {gpus} GPUs, "
            f"{at_thousand:.2f} s at 1,000: {at_thousand / INTERVAL:.1%} of {INTERVAL:g} s"
        )
    print(f"after / before: {rules['after'] / rules['before']:.2f}\n")


def _measured(watchers: Mapping[str, Watcher], seconds: float) -> dict[str, dict[str, float]]:
    """Return the seconds of each rule per interval: the minimum of many evaluations."""
    least: dict[str, dict[str, float]] = {side: {} for side in watchers}
    for _ in range(READS):
        time.sleep(seconds / READS)
        for side, watcher in watchers.items():
            for name, value in watcher.rules().items():
                # A rule without an evaluation yet has no time.
                if value:
                    least[side][name] = min(value, least[side].get(name, value))
    return least


def _show(least: Mapping[str, Mapping[str, float]], gpus: int) -> None:
    sums = {side: sum(rules.values()) for side, rules in least.items()}
    for side, total in sums.items():
        at_thousand = total / gpus * 1000
        print(
            f"{side}: {len(least[side])} rules, {total:.3f} s per interval at {gpus} GPUs, "
            f"{at_thousand:.2f} s at 1,000: {at_thousand / INTERVAL:.1%} of {INTERVAL:g} s"
        )
    print(f"after / before: {sums['after'] / sums['before']:.2f}")
    for side, rules in least.items():
        print(f"\nSlowest rules {side}:")
        for name, value in sorted(rules.items(), key=lambda item: -item[1])[:MAX_LISTED]:
            print(f"- {value * 1e3:.1f} ms {name}")
        groups: dict[str, float] = {}
        for name, value in rules.items():
            group = name.partition(":")[0]
            groups[group] = groups.get(group, 0.0) + value
        print(", ".join(f"{group} {value * 1e3:.0f} ms" for group, value in groups.items()))


if __name__ == "__main__":
    main()
