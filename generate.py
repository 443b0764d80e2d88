"""Write every generated file, or with --check only name the files that are out of date."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
RULES = ROOT / "prometheus" / "rules"
# A file and its text, or None for a file that must be removed.
Files = dict[Path, str | None]
Part = Callable[[], Files]


def rules() -> Files:
    """Return Prometheus's rules, rendered from the shipped thresholds."""
    from torchmem.explain.thresholds import defaults
    from torchmem.manifests.render import RENDERED_BY, render

    earlier = (path for path in RULES.glob("*.yml") if path.read_text().startswith(RENDERED_BY))
    current = {RULES / name: text for name, text in render(defaults()).items()}
    return {**dict.fromkeys(earlier), **current}


def dashboards() -> Files:
    """Return the dashboards' JSON; without their generator, return nothing and print why."""
    if find_spec("grafana_foundation_sdk") is None:
        print("Skipped dashboards/json: the generator needs Python 3.11 or newer.")
        return {}
    return rendered_by("dashboards.build")


def rendered_by(module: str) -> Files:
    """Return what the function `rendered` of a module outside the package returns."""
    files: Files = import_module(module).rendered()
    return files


# The order matters: the rules contain URLs of the thresholds file, the pages and the manifests read
# the rules and the dashboards from disk, and the manifests are rendered from the chart.
PARTS: Sequence[Part] = (
    lambda: rendered_by("deploy.urls"),
    rules,
    dashboards,
    lambda: rendered_by("docs.generate.metrics"),
    lambda: rendered_by("docs.generate.commands"),
    lambda: rendered_by("docs.generate.settings"),
    lambda: rendered_by("docs.generate.dashboards"),
    lambda: rendered_by("docs.generate.alerts"),
    lambda: rendered_by("docs.generate.scenarios"),
    lambda: rendered_by("docs.generate.top"),
    lambda: rendered_by("docs.generate.prediction"),
    lambda: rendered_by("docs.generate.quiet_fleet"),
    lambda: rendered_by("docs.generate.verdict"),
    lambda: rendered_by("docs.generate.messages"),
    lambda: rendered_by("docs.generate.versions"),
    lambda: rendered_by("docs.generate.real_gpu"),
    lambda: rendered_by("deploy.helm.build"),
    lambda: rendered_by("deploy.kubernetes.build"),
    lambda: rendered_by("deploy.completion"),
    lambda: rendered_by("docs.generate.programs"),
)


def stale(files: Files) -> Files:
    """Return the files whose text differs from what is on disk."""
    return {path: text for path, text in files.items() if text != _on_disk(path)}


def write(files: Files) -> None:
    """Write the files, and remove those without text."""
    for path, text in files.items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Return 0, or with --check 1 if any file is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is out of date")
    check = parser.parse_args(arguments).check
    outdated = False
    for part in parts:
        files = stale(part())
        outdated |= bool(files)
        for path in files:
            state = "is out of date: run make generate." if check else "written."
            print(f"{os.path.relpath(path, ROOT)} {state}")
        if not check:
            write(files)
    return int(check and outdated)


def _on_disk(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
