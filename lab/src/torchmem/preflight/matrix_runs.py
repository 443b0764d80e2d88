"""Runs a matrix: scripts side by side, their output, and a file of results to go on from."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from torchmem.host.host_memory import host_memory
from torchmem.output.terminal import StatusLine, counted
from torchmem.preflight.matrix import Cell, CellResult, Matrix, MatrixResult
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.run import DeferredSignals, RunningScript
from torchmem.preflight.runner import show_output
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import convert, strict_json

SCHEMA = 1
KIND = "preflight_result"
POLL_SECONDS = 0.05
_BEGINNING = f'{{"kind": "{KIND}"'.encode()


class Started(Protocol):
    """A run that has started: torchmem.preflight.run.RunningScript."""

    def poll(self) -> RunResult | None:
        """Return the result if the run has ended."""

    def ask_to_end(self) -> None:
        """Ask all its processes to end, and do not wait."""

    def end(self) -> None:
        """End all its processes."""


Start = Callable[[RunPlan, Path, int], Started]
"""Starts one plan, with an empty folder and a descriptor for its output."""


def start_script(plan: RunPlan, folder: Path, output: int) -> Started:
    """Start the script of one cell. Raises UsageError."""
    running = RunningScript(plan, folder, lambda _: None)
    running.start(output, output)
    return running


class MatrixRuns:
    """Runs the cells of a matrix that a file of earlier results lacks, several at a time.

    jobs: runs at a time, None for as many as fit this machine. resume: the file, None without one.
    clock: seconds, from any start. Raises UsageError if the file cannot be used.
    """

    def __init__(
        self,
        matrix: Matrix,
        scratch: Path,
        jobs: int | None,
        resume: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._matrix = matrix
        self._scratch = scratch
        self._jobs = jobs
        self._memory = host_memory()
        self._file = ResultFile(resume) if resume else None
        self._clock = clock
        self._running: list[tuple[Cell, Started]] = []
        self._ran: list[CellResult] = []

    def run(self, start: Start = start_script) -> MatrixResult:
        """Run the cells and return all results, in the order of the matrix.

        An exception or a signal ends those that run. Raises UsageError.
        """
        begun = self._clock()
        earlier = self._file.results(self._matrix.cells) if self._file else {}
        missing = deque(cell for cell in self._matrix.cells if cell not in earlier)
        try:
            with StatusLine() as status:
                while missing or self._running:
                    while missing and len(self._running) < self._limit():
                        with DeferredSignals():  # until `finally` can find the run
                            cell = missing.popleft()
                            self._running.append((cell, self._start(start, cell)))
                    status.show(self._label, len(earlier) + len(self._ran), len(self._matrix.cells))
                    if not self._collect():
                        time.sleep(POLL_SECONDS)
        finally:
            with DeferredSignals():
                for _, started in self._running:
                    started.ask_to_end()
                for _, started in self._running:
                    started.end()
        results = {each.cell: each for each in self._ran} | earlier
        cells = tuple(results[cell] for cell in self._matrix.cells)
        return MatrixResult(self._matrix, cells, self._clock() - begun)

    def _label(self) -> str:
        return f"phantom, {counted(len(self._running), 'combination')} running"

    def _limit(self) -> int:
        if self._jobs is not None:
            return self._jobs
        available = self._memory.available_bytes if self._memory else None
        return jobs_for(self._ran, len(os.sched_getaffinity(0)), available)

    def _collect(self) -> bool:
        """Take the results of the runs that have ended; return whether there were any."""
        polled = [(cell, started, started.poll()) for cell, started in self._running]
        self._running = [(cell, started) for cell, started, result in polled if result is None]
        for cell, _, result in polled:
            if result is not None:
                self._ran.append(CellResult(result, cell))
                self._done(self._ran[-1])
        return len(polled) > len(self._running)

    def _start(self, start: Start, cell: Cell) -> Started:
        folder = self._folder(cell)
        folder.mkdir()
        with self._output(cell).open("wb") as output:  # the script has its own descriptor
            return start(cell.plan, folder, output.fileno())

    def _done(self, found: CellResult) -> None:
        """Keep a result, show the output of a script that failed, and remove its files."""
        if self._file:
            self._file.add(found)
        if found.result.ended in {"error", "unsupported"}:
            print(f"torchmem: the output of {self._matrix.label(found.cell)}:", file=sys.stderr)
            show_output(self._output(found.cell).read_bytes())
        shutil.rmtree(self._folder(found.cell))

    def _output(self, cell: Cell) -> Path:
        return self._folder(cell).with_suffix(".output")

    def _folder(self, cell: Cell) -> Path:
        return self._scratch / str(self._matrix.cells.index(cell) + 1)


def jobs_for(results: Sequence[CellResult], cores: int, available_bytes: int | None) -> int:
    """Return how many runs to have at a time if the user gives no number: as many as cores.

    The first run is alone. The others need as much RAM as the largest so far, and together at most
    what was available at the start.
    """
    largest = max((each.result.host_bytes for each in results), default=0)
    if not results:
        return 1
    if not largest or available_bytes is None:
        return cores
    return max(1, min(cores, available_bytes // largest))


class ResultFile:
    """Results of earlier runs, one line of JSON for each, under what was run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def results(self, cells: Sequence[Cell]) -> dict[Cell, CellResult]:
        """Return the results of these cells that the file has, except those without a verdict.

        A line that the end of an earlier preflight cut off is skipped. Raises UsageError.
        """
        read = [self._read(number, line) for number, line in enumerate(self._lines(), 1)]
        known = {_text(key): result for key, result in filter(None, read)}
        found = {}
        for cell in cells:
            result = known.get(_text(_key(cell.plan)))
            if result is not None:
                found[cell] = CellResult(result, cell, is_resumed=True)
        return {cell: each for cell, each in found.items() if each.error is None}

    def add(self, found: CellResult) -> None:
        """Append a result. Raises UsageError."""
        outcome = asdict(replace(found.result, snapshot=None, oom_report=None))
        line = {"kind": KIND, "schema": SCHEMA, "plan": _key(found.cell.plan), "outcome": outcome}
        try:
            with self._path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                is_cut = file.read(1) not in {b"", b"\n"}
                file.write(b"\n" * is_cut + json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise self._unusable(error) from error

    def _lines(self) -> list[bytes]:
        try:
            return self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error

    def _read(self, number: int, line: bytes) -> tuple[Mapping[str, Any], RunResult] | None:
        try:
            values = strict_json(line)
            if (values["kind"], values["schema"]) == (KIND, SCHEMA):
                return values["plan"], convert(values["outcome"], RunResult)
        except (ValueError, KeyError, TypeError):
            if line.startswith(_BEGINNING) and not line.endswith(b"}"):
                return None
        raise UsageError(
            f"--resume: line {number} of {self._path} is not a result of a matrix that this "
            "version can read: choose another file."
        )

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(
            f"--resume: cannot use {self._path} ({error.strerror}): choose another file."
        )


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _key(plan: RunPlan) -> dict[str, Any]:
    """Return what was run, as JSON reads it back."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(plan), default=str))
    return values
