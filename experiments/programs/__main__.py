"""Run programs from PyPI on phantom GPUs: plain, with TORCHMEM=1, and under `torchmem run`.

    make test-programs                       # all of them; goes on where it stopped
    make test-programs ARGS=--core           # ten of them, in five minutes
    make test-programs ARGS='--only TRL --again'

Each program has an environment of its own under .venv-programs/, in which torchmem is installed
from its wheel. Exit code, stdout and stderr are compared, and the steps that the program itself
counts ("true steps") with those that torchmem counts. Nothing is computed on a phantom GPU, so
losses mean nothing. A line of output that differs between two plain runs is left out. The exit
code is 1 if an outcome differs or steps are wrong. `--write` publishes the results for the
documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from experiments.monitored_runs import (
    PLAIN,
    RUN,
    VARIABLE,
    Command,
    Outcome,
    differences,
    published,
)
from experiments.programs.environment import (
    ROOT,
    InstallError,
    built_wheel,
    environment,
    versions,
)
from experiments.programs.table import PROGRAMS, Program

SCRIPTS = Path(__file__).with_name("scripts")
STATE = ROOT / "build" / "programs" / "results.json"
RESULTS = Path(__file__).with_name("results.json")
TIMEOUT_SECONDS = 600
TRUE = "true steps "


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a program.

    Attributes:
        versions: of PyTorch and of its packages.
        reason: why it was not installed or did not run; "" if it ran.
        code: its exit code.
        differs: by way, what differs from the plain runs.
        steps: what the program says of the steps of each rank.
        ranks: what torchmem says of each process, by way.
        cpu_seconds: CPU time of the run, by way.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    code: int | None = None
    differs: dict[str, list[str]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    ranks: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def wrong_steps(self) -> list[str]:
        """The ways in which steps were counted wrongly; absent steps are not wrong."""
        return [way for way in self.ranks if not _are_right(self._counted(way), self.steps)]

    def _counted(self, way: str) -> list[int]:
        return [n for each in self.ranks[way] if isinstance(n := each["steps"], int)]


def _are_right(counted: Sequence[int], true: Sequence[int]) -> bool:
    left = list(true)
    for steps in (each for each in counted if each):
        if steps not in left:
            return False
        left.remove(steps)
    return True


def tried(program: Program, wheel: Path) -> Result:
    """Install and run a program in every way."""
    try:
        folder = environment(program.requirements, wheel)
    except InstallError as error:
        return Result(program.name, reason=f"not installed: {error}")
    known = Result(program.name, versions(folder, ("torch", *program.packages)))
    try:
        return _compared(program, folder, known)
    except subprocess.TimeoutExpired:
        return replace(known, reason=f"did not end within {TIMEOUT_SECONDS} s")


def _compared(program: Program, folder: Path, known: Result) -> Result:
    plain = [_run(program, folder, PLAIN)]
    if plain[0].code:
        return replace(known, code=plain[0].code, reason=_why(plain[0]))
    others = {way: _run(program, folder, way) for way in (VARIABLE, RUN)}
    if any(list(differences(plain[0], each)) for each in others.values()):
        plain.append(_run(program, folder, PLAIN))
    return replace(
        known,
        code=plain[0].code,
        differs={way: found for way, each in others.items() if (found := compared(plain, each))},
        steps=[*program.steps, *_true_steps(plain[0])],
        ranks={
            way: [asdict(rank) for rank in published(each.page)] for way, each in others.items()
        },
        cpu_seconds={
            way: round(each.cpu_seconds, 2) for way, each in {PLAIN: plain[0], **others}.items()
        },
    )


def _true_steps(plain: Outcome) -> list[int]:
    return [int(line[len(TRUE) :]) for line in plain.lines if line.startswith(TRUE)]


def _run(program: Program, folder: Path, way: str) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        work, state = Path(scratch) / "work", Path(scratch) / "state"
        shutil.copytree(SCRIPTS, work)
        state.mkdir()
        found = shutil.which(program.words[0], path=folder / "bin") or program.words[0]
        variables = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "HOME": scratch,
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        command = Command(
            [found, *program.words[1:]],
            work,
            str(folder / "bin" / "python"),
            program.gpus,
            TIMEOUT_SECONDS,
            variables,
        )
        return command.run(way, state)


def compared(plain: Sequence[Outcome], other: Outcome) -> list[str]:
    """Return what differs from the plain runs, without lines that differ between these."""
    return list(differences(_without(plain[0], plain), _without(other, plain)))


def _without(outcome: Outcome, plain: Sequence[Outcome]) -> Outcome:
    """Return an outcome without the lines that only one of the plain runs has."""
    if len(plain) < 2:
        return outcome
    first, second = plain
    unstable = {
        *(set(first.shape) ^ set(second.shape)),
        *(set(first.error_shape) ^ set(second.error_shape)),
    }
    lines = [line for line in outcome.shape if line not in unstable]
    errors = [line for line in outcome.error_shape if line not in unstable]
    return replace(outcome, lines=lines, errors=errors)


def _why(outcome: Outcome) -> str:
    lines = [line.strip() for line in (*outcome.lines, *outcome.errors) if line.strip()]
    return f"ends with {outcome.code}: {lines[-1][:200] if lines else 'no output'}"


def verdict(result: Result) -> str:
    """Return in a few words what a program's runs show."""
    if result.reason:
        return result.reason
    found = [f"{way}: {'; '.join(what)}" for way, what in result.differs.items()]
    found += [f"{way}: steps {result.ranks[way]}" for way in result.wrong_steps]
    return "; ".join(found) or "equal"


def _load(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    return {each["name"]: Result(**each) for each in json.loads(path.read_text())}


def _save(path: Path, results: dict[str, Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [asdict(results[each.name]) for each in PROGRAMS if each.name in results]
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> None:
    """Try the programs that have no result yet, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--core", action="store_true", help="only the ten of the core")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--write", action="store_true", help="publish all results")
    arguments = parser.parse_args()
    results, wheel = _load(STATE), built_wheel()
    chosen = [
        each
        for each in PROGRAMS
        if arguments.only.lower() in each.name.lower() and (each.is_core or not arguments.core)
    ]
    for program in chosen:
        if arguments.again or program.name not in results:
            results[program.name] = tried(program, wheel)
            _save(STATE, results)
        print(f"{program.name}: {verdict(results[program.name])}", flush=True)
    if arguments.write:
        _save(RESULTS, results)
    found = [results[each.name] for each in chosen]
    if any(each.differs or each.wrong_steps for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
