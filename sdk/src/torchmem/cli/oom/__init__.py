"""`torchmem oom`: why a process ran out of GPU memory, and what to do; needs no extra."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torchmem.cli.oom import files, text
from torchmem.cli.output import write_out
from torchmem.core.report import encode
from torchmem.core.rundir import run_directory

HELP = "explain an OutOfMemoryError that an instrumented process left behind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="report (default: the newest one)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="where to look for reports")
    parser.add_argument("--list", action="store_true", help="list all reports of the run directory")
    parser.add_argument("--json", action="store_true", help="print the reports themselves, one line of JSON for each")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for; raises UsageError when there is no report or it cannot be read."""
    directory = arguments.run_dir or run_directory(os.environ)
    if arguments.list:
        found = files.load_all(directory)
    else:
        path = arguments.file or files.newest(directory)
        found = [(path, files.load(path))]
    if arguments.json:
        write_out("".join(encode(report).decode() for _, report in found))
    else:
        write_out(text.table(found) if arguments.list else text.page(*found[0]))
    return 0
