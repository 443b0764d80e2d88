"""Compare what-if's answers for late recordings with PyTorch's real allocator:

    PYTHONPATH=tests python -m experiments.midrun.compare /tmp/midrun [--torch DIR] [WORKLOAD…]

Each workload is recorded in the middle of its run, with the phantom driver's addresses in four
orders. Then it is run again with other settings: switched where the recording begins, and from the
start. `--torch` is a folder with another PyTorch (pip install --no-deps --target DIR torch==X.Y.Z).
Results stay in the folder, and a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.midrun.runs import ADDRESSES, WORKLOADS, run

from torchmem.trace import read
from torchmem.whatif.engine import what_if
from torchmem.whatif.mid_run import ESTIMATE_MARGIN
from torchmem.whatif.result import ReplayResult, Restart, WhatIf

EXPANDABLE = "expandable_segments:True"
SWITCHES = (EXPANDABLE, "roundup_power2_divisions:4", f"{EXPANDABLE},roundup_power2_divisions:8")
RESTARTS = (EXPANDABLE, "max_split_size_mb:128", "roundup_power2_divisions:4")
COUNTED = ("peak_reserved", "retries", "ooms", "device_allocs", "device_frees")
Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Truth:
    """What the real allocator counted, by setting."""

    switched: dict[str, Counts]
    restarted: dict[str, Counts]


@dataclass(frozen=True, slots=True)
class Checked:
    """One answer against the truth: exact switches, relative errors of estimates, directions."""

    answer: WhatIf
    switches: int
    exact_switches: int
    estimate_errors: tuple[float, ...]
    directions: int
    wrong_directions: int
    refuted: str | None


def counted(folder: Path, name: str, mode: str, torch: Path | None, **options: str) -> Counts:
    """Return the counts of a run, which is made if the folder lacks it."""
    if not (folder / "counts.json").exists():
        run(WORKLOADS[name], mode, folder, torch=torch, **options)
    counts: Counts = json.loads((folder / "counts.json").read_text())
    return counts


def truth_of(folder: Path, name: str, torch: Path | None) -> Truth:
    """Return what each setting does, switched and from the start."""
    switched = {
        conf: counted(folder / f"switch-{number}", name, f"switch:{conf}", torch)
        for number, conf in enumerate(SWITCHES)
    }
    restarted = {
        conf: counted(folder / f"restart-{number}", name, "plain", torch, conf=conf)
        for number, conf in enumerate(RESTARTS)
    }
    return Truth(switched, restarted)


def check(answer: WhatIf, truth: Truth) -> Checked:
    """Compare every claim of an answer with the truth."""
    recorded = answer.outcomes[0].peak_reserved
    switched = [each for each in answer.outcomes[1:] if each.conf in truth.switched]
    exact = sum(_counts(each) == _comparable(truth.switched[each.conf]) for each in switched)
    known = [each for each in answer.restarts if _completed(truth, each)]
    errors = tuple(
        each.peak_reserved / truth.restarted[each.conf]["peak_reserved"] - 1
        for each in known
        if each.peak_reserved is not None
    )
    directions = [each for each in known if each.direction is not None]
    wrong = sum(
        not _has_direction(each, truth.restarted[each.conf]["peak_reserved"], recorded)
        for each in directions
    )
    refuted = _refutation(answer, truth, recorded)
    return Checked(answer, len(switched), exact, errors, len(directions), wrong, refuted)


def _counts(replay: ReplayResult) -> Counts:
    return {name: getattr(replay, name) for name in COUNTED}


def _comparable(counts: Counts) -> Counts:
    return {name: counts[name] for name in COUNTED}


def _completed(truth: Truth, restart: Restart) -> bool:
    return restart.conf in truth.restarted and not truth.restarted[restart.conf]["ooms"]


def _has_direction(restart: Restart, peak: int, recorded: int) -> bool:
    if restart.direction == "less":
        return peak < recorded
    return restart.direction == "same" or peak > recorded


def _refutation(answer: WhatIf, truth: Truth, recorded: int) -> str | None:
    """Return how the real allocator contradicts the verdict, or None if it does not."""
    verdict = answer.verdict
    if verdict.decision == "keep":
        for conf, counts in truth.restarted.items():
            saved = 1 - counts["peak_reserved"] / recorded
            if saved > ESTIMATE_MARGIN and not counts["ooms"]:
                return f"kept, but {conf} saves {saved:.0%}"
        return None
    conf = next((each.conf for each in answer.outcomes if each.name == verdict.recommended), "")
    if conf in truth.restarted and "restart" in verdict.sentence:
        saved = 1 - truth.restarted[conf]["peak_reserved"] / recorded
        return None if saved > 0 else f"{conf} after a restart saves {saved:.0%}"
    if conf in truth.switched:
        before, after = answer.outcomes[0], truth.switched[conf]
        if (after["ooms"], after["retries"]) > (before.ooms, before.retries):
            return f"{conf} has more retries"
    return None


def answers(folder: Path, name: str, torch: Path | None) -> Iterator[tuple[str, Checked]]:
    """Yield the order of addresses and the checked answer of each recording of a workload."""
    truth = truth_of(folder, name, torch)
    for addresses in ADDRESSES:
        place = folder / addresses.replace(":", "-")
        counted(place, name, "record", torch, addresses=addresses)
        (recording,) = read(place / "snapshot.pickle")
        usual = what_if(recording)
        confs = dict.fromkeys([*SWITCHES, *RESTARTS])
        asked = what_if(recording, settings=list(confs))
        checked = check(asked, truth)
        refuted = _refutation(usual, truth, usual.outcomes[0].peak_reserved)
        yield (
            addresses,
            Checked(
                usual,
                checked.switches,
                checked.exact_switches,
                checked.estimate_errors,
                checked.directions,
                checked.wrong_directions,
                refuted or checked.refuted,
            ),
        )


def line(name: str, addresses: str, checked: Checked) -> str:
    """Return the result of one recording."""
    fidelity, verdict = checked.answer.fidelity, checked.answer.verdict
    errors = ", ".join(f"{error:+.1%}" for error in checked.estimate_errors) or "-"
    return (
        f"{name:15} {addresses:11} landed {fidelity.share:7.2%}  {verdict.decision:6} "
        f"{verdict.recommended or '':22} "
        f"switches exact {checked.exact_switches}/{checked.switches}  "
        f"estimates {errors}  directions wrong {checked.wrong_directions}/{checked.directions}  "
        f"{checked.refuted or ''}"
    )


def main() -> None:
    """Compare all workloads and print one line for each recording, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--torch", type=Path)
    flags = parser.parse_args()
    everything: list[Checked] = []
    for name in flags.workloads:
        folder = flags.folder / name.replace(", ", "-")
        for addresses, checked in answers(folder, name, flags.torch):
            everything.append(checked)
            print(line(name, addresses, checked), flush=True)
    decided = sum(each.answer.verdict.decision != "none" for each in everything)
    errors = [error for each in everything for error in each.estimate_errors]
    print(
        f"verdicts {decided} of {len(everything)}, "
        f"refuted {sum(each.refuted is not None for each in everything)}; switches exact "
        f"{sum(each.exact_switches for each in everything)} of "
        f"{sum(each.switches for each in everything)}; estimates {min(errors, default=0):+.1%} to "
        f"{max(errors, default=0):+.1%}"
    )


if __name__ == "__main__":
    main()
