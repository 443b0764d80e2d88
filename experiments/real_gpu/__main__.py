"""Find out in nine minutes what only a real NVIDIA GPU can show.

    make test-gpu                                   # with a network: makes an environment
    make gpu-wheels && make test-gpu GPU_PYTHON=python3     # the wheels travel with the checkout
    make test-gpu ARGS=--phantom                    # the same on the phantom GPU

Every subject runs on the GPU and, at the same time, on a phantom of it, whose figures stand beside
the GPU's. The report is written after every subject, as JSON and as Markdown. The exit code is 1 if
a subject has failed or had no time. A report.json of a real GPU that is copied to results.json in
this folder becomes docs/measurements/real-gpu.md by `make generate`.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from experiments.real_gpu import machine as machines
from experiments.real_gpu.registry import SUBJECTS, TOTAL_SECONDS, Subject
from experiments.real_gpu.report import Report, markdown
from experiments.real_gpu.runner import Command, Result, run

OUT = machines.ROOT / "build" / "real-gpu"


class Run:
    """A run, which keeps its report on disk up to date."""

    def __init__(self, report: Report, out: Path) -> None:
        self.report = report
        self._out = out
        self._lock = threading.Lock()

    def on(self, where: str, subjects: Sequence[Subject], seconds: float, on_gpu: Command) -> None:
        """Run the subjects on the `real` GPU or the `phantom`."""
        results: dict[str, Result] = getattr(self.report, where)

        def done(result: Result) -> None:
            with self._lock:
                results[result.name] = result
                self.save()
            why = f": {result.reason}" if result.reason else ""
            print(
                f"{where:8}{result.name:12}{result.state}, {result.seconds:.0f} s{why}", flush=True
            )
            for figure in result.figures:
                if figure.right is False:
                    print(f"        {figure.name}: {figure.value}, beside {figure.beside}")

        run(subjects, seconds, machines.environment(), on_gpu, done)

    def save(self) -> None:
        """Write both reports."""
        self._out.mkdir(parents=True, exist_ok=True)
        self.report.save(self._out / "report.json")
        (self._out / "report.md").write_text(markdown(self.report) + "\n", encoding="utf-8")


def measure(subjects: Sequence[Subject], seconds: float, found: Run) -> None:
    """Run the subjects on the phantom and, if the machine has one, on its GPU."""
    machine = found.report.machine

    def phantom(command: list[str], folder: Path) -> list[str]:
        return machines.on_phantom(machine, command, folder / "gpus")

    beside = threading.Thread(target=found.on, args=("phantom", subjects, seconds, phantom))
    beside.start()
    if machine.gpu:
        found.on("real", subjects, seconds, lambda command, _: command)
    beside.join()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [subject.name for subject in SUBJECTS]
    add("--only", nargs="+", choices=names, default=names, metavar="SUBJECT", help=", ".join(names))
    add("--seconds", type=float, default=TOTAL_SECONDS, help="of all subjects (%(default)s)")
    add("--phantom", action="store_true", help="only the phantom, also where there is a GPU")
    add("--out", type=Path, default=OUT, help="folder of the reports (default: build/real-gpu)")
    return parser.parse_args()


def main() -> None:
    """Measure, and print what was found."""
    arguments = _arguments()
    try:
        machines.unpack_wheels()
        machine = machines.describe()
    except machines.MachineError as error:
        sys.stderr.write(f"test-gpu: {error}\n")
        raise SystemExit(2) from None
    if arguments.phantom:
        machine = machines.Machine(machine.python, machine.torch, machine.cuda)
    elif not machine.gpu:
        sys.stderr.write(
            "test-gpu: PyTorch sees no NVIDIA GPU here: ARGS=--phantom runs it on the phantom.\n"
        )
        raise SystemExit(2)
    found = Run(Report(machine, f"{datetime.now(timezone.utc):%Y-%m-%d}"), arguments.out)
    measure([each for each in SUBJECTS if each.name in arguments.only], arguments.seconds, found)
    print(f"{arguments.out / 'report.md'}: not right are {', '.join(found.report.bad) or 'none'}")
    raise SystemExit(bool(found.report.bad))


if __name__ == "__main__":
    main()
