"""Run programs from PyPI on phantom GPUs: plain, with TORCHMEM=1, and under `torchmem run`.

    make test-programs                       # all of them; goes on where it stopped
    make test-programs ARGS=--core           # ten of them, in five minutes
    make test-programs ARGS='--only TRL --again'

Each program has an environment of its own under .venv-programs/, in which torchmem is installed
from its wheel. Exit code, stdout and stderr are compared, and the steps that the program itself
counts ("true steps") with those that torchmem counts. Nothing is computed on a phantom GPU, so
losses mean nothing. A line of output that differs between two plain runs is left out, and what
differs counts if it does so twice. The exit code is 1 if an outcome differs or steps are wrong.
`--write` publishes the results for the documentation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
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
    InstallError,
    built_wheel,
    environment,
    versions,
)
from experiments.programs.results import PUBLISHED, STATE, Result, load, save
from experiments.programs.table import PROGRAMS, Program

SCRIPTS = Path(__file__).with_name("scripts")
TIMEOUT_SECONDS = 600
TRUE = "true steps "


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
    # The first run also reads the files of its packages from disk; the last has them in memory.
    plain.append(_run(program, folder, PLAIN))
    differs = {
        way: found
        for way, each in others.items()
        if compared(plain, each) and (found := compared(plain, _run(program, folder, way)))
    }
    return replace(
        known,
        code=plain[0].code,
        differs=differs,
        steps=[*program.steps, *_true_steps(plain[0])],
        ranks={
            way: [asdict(rank) for rank in published(each.page)] for way, each in others.items()
        },
        cpu_seconds={
            way: round(each.cpu_seconds, 2) for way, each in {PLAIN: plain[-1], **others}.items()
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
    results, wheel = load(STATE), built_wheel()
    chosen = [
        each
        for each in PROGRAMS
        if arguments.only.lower() in each.name.lower() and (each.is_core or not arguments.core)
    ]
    for program in chosen:
        if arguments.again or program.name not in results:
            results[program.name] = tried(program, wheel)
            save(STATE, results)
        print(f"{program.name}: {results[program.name].summary}", flush=True)
    if arguments.write:
        save(PUBLISHED, results)
    found = [results[each.name] for each in chosen]
    if any(each.differs or each.wrong_steps for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
