"""Run the core of the allocator tier on each Python and PyTorch: `make test-versions`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.generate.versions import Result
from versions.environment import ROOT, InstallError, built_wheel, installed
from versions.matrix import PYTHONS, Python, pairs
from versions.results import junit_result, record

CORE = Path(__file__).with_name("test_core.py")


def main() -> int:
    """Try each pair, and return 1 if a check failed anywhere."""
    arguments = _arguments()
    chosen = list(pairs(arguments.python or PYTHONS, arguments.torch, _say))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="torchmem-versions-") as scratch:
        wheel = built_wheel(sys.executable, Path(scratch))
        for python, torch in chosen:
            result = _try(python, torch, wheel, Path(scratch))
            failed += result is None or bool(result.failed)
            if result and not arguments.no_record:
                record(result)
    return int(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-versions ARGS=...", description=__doc__)
    add = parser.add_argument
    add("--python", action="append", help=f"such as 3.12 (default: {', '.join(PYTHONS)})")
    add("--torch", action="append", default=[], help="such as 2.13.0, for each of the Pythons")
    add("--no-record", action="store_true", help="leave results.json as it is")
    return parser.parse_args()


def _try(python: Python, torch: str, wheel: Path, scratch: Path) -> Result | None:
    """Return the result in an environment that exists only meanwhile; None without one."""
    name = f"Python {python.version}, PyTorch {torch}"
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        try:
            interpreter = installed(python.path, torch, wheel, Path(folder, "venv"))
        except InstallError as error:
            _say(f"{name}: not tried, it cannot be installed ({error})")
            return None
        result = junit_result(python.version, torch, _core(interpreter, Path(folder)))
    _say(f"{name}: {result.passed} passed, {len(result.failed)} failed")
    for check, reason in (result.failed | result.skipped).items():
        _say(f"    {check}: {reason}")
    return result


def _core(interpreter: str, folder: Path) -> Path:
    """Run the core with an interpreter and return pytest's report."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", str(CORE)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [*command, "--interpreter", interpreter, f"--junitxml={report}"],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(folder)},
        check=False,
    )
    return report


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
