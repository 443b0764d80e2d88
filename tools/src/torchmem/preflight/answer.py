"""From the flags to what is printed and drawn."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from torchmem.cli.terminal import write_out
from torchmem.preflight import document
from torchmem.preflight.attempts import Attempts, Runner
from torchmem.preflight.report import report
from torchmem.preflight.run import ENDING, Postponed
from torchmem.preflight.search import find_batch, sweep
from torchmem.preflight.text import run_page, search_page, sweep_page
from torchmem.preflight.wanted import Wanted, check_machine, checked, listing
from torchmem.sample.errors import TorchmemError


def answer(arguments: argparse.Namespace, runner: Runner | None) -> int:
    """Do what the flags say and return the exit code; raises UsageError, or InterruptedTryError after Ctrl-C."""
    if arguments.list_cards:
        write_out(listing())
        return 0
    wanted = checked(arguments)
    check_machine(os.environ, beside_gpu=arguments.beside_gpu)
    with _interrupted_by_signals(), _scratch_folder() as scratch:
        return _say(wanted, Attempts(runner or _real(), scratch, wanted.json))


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder that goes, also when a further signal comes while it is emptied."""
    with Postponed():
        scratch = tempfile.TemporaryDirectory(prefix="torchmem-preflight-")
    try:
        yield Path(scratch.name)
    finally:
        with Postponed():
            scratch.cleanup()


def _real() -> Runner:
    from torchmem.preflight.run import run

    return run


def _say(wanted: Wanted, attempts: Attempts) -> int:
    if wanted.search:
        found = find_batch(wanted.plan, wanted.search, attempts)
        write_out(document.search_document(found) if wanted.json else search_page(found))
        return 0 if found.best else 1
    if wanted.sweep:
        swept = sweep(wanted.plan, wanted.sweep, attempts)
        write_out(document.sweep_document(swept) if wanted.json else sweep_page(swept))
        return swept.exit_code
    said = report(wanted, attempts)
    write_out(document.run_document(said) if wanted.json else "\n" + run_page(said))
    if wanted.plot:
        from torchmem.preflight import plot

        plot.draw(said, wanted.plot)
    return 0 if said.verdict.fits else 1


class InterruptedTryError(TorchmemError):
    """Ctrl-C, SIGTERM or SIGHUP; 128 and the number of SIGINT, as shells count."""

    exit_code = 130


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end the script and leave nothing, as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    wanted = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in wanted:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedTryError("interrupted: nothing is left running.") from None
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
