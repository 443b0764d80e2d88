"""`torchmem manifests rules`: write Prometheus' rules for a file of thresholds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmem.sample.errors import UsageError

HELP = "write recording and alerting rules for Prometheus from your thresholds"
EPILOG = """\
Examples:
  torchmem manifests rules --defaults > thresholds.yml
  torchmem manifests rules --thresholds thresholds.yml --out rules
  torchmem manifests rules --out torchmem.yml
  torchmem manifests rules --prometheus-rule monitoring --out rules.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--thresholds",
        type=Path,
        metavar="FILE",
        help="the file of your thresholds (default TORCHMEM_THRESHOLDS, else the shipped)",
    )
    action = parser.add_mutually_exclusive_group()
    add = action.add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR|FILE",
        help="the directory to write to, one file for each subject; or one .yml file",
    )
    add(
        "--check",
        type=Path,
        metavar="DIR|FILE",
        help="write nothing; fail if the rules there differ",
    )
    add(
        "--defaults",
        action="store_true",
        help="print the shipped thresholds, as a template for your file",
    )
    parser.add_argument(
        "--prometheus-rule",
        metavar="NAMESPACE",
        help="the one .yml file is a PrometheusRule of this namespace, for the Prometheus Operator",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace files of the same names that this command did not write",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the shipped thresholds, write the rules, or check them; return the exit code.

    Raises MissingExtraError and UsageError.
    """
    from torchmem.explain.chosen_thresholds import chosen
    from torchmem.explain.thresholds import defaults_text
    from torchmem.manifests import render

    if arguments.defaults:
        sys.stdout.write(defaults_text())
        return 0
    place = arguments.check or arguments.out
    if place is None:
        raise UsageError("--out is missing: give the directory or the .yml file for the rules.")
    thresholds = chosen(arguments.thresholds, "manifests rules --thresholds")
    namespace = arguments.prometheus_rule
    folder, rendered = render.at(place, render.render(thresholds))
    if namespace and place == folder:
        raise UsageError("--prometheus-rule writes one file: give --out a name that ends in .yml.")
    if namespace:
        rendered = {place.name: render.prometheus_rule(thresholds, namespace)}
    if arguments.check:
        return _check(place, render.outdated(folder, rendered))
    render.write(folder, rendered, force=arguments.force)
    if place == folder:
        print(f"Wrote {len(rendered)} files to {place}.")
        place /= "*.yml"
    else:
        print(f"Wrote {place}.")
    if namespace:
        print(f"Apply it with: kubectl apply -f {place}")
    else:
        print(f"Check them with: promtool check rules {place}")
    return 0


def _check(place: Path, outdated: list[str]) -> int:
    if not outdated:
        return 0
    print(
        f"torchmem: {place} does not match the thresholds ({', '.join(outdated)}): run "
        f"`torchmem manifests rules --out {place}` with the same thresholds.",
        file=sys.stderr,
    )
    return 1
