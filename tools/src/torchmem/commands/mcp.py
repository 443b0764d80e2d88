"""`torchmem mcp`: answer the questions of AI assistants, over the Model Context Protocol."""

from __future__ import annotations

import argparse
import os

from torchmem.cli.flags import add_run_directory
from torchmem.sample.errors import MissingExtraError
from torchmem.sample.run_directory import run_directory

HELP = "serve read-only tools for AI assistants over the Model Context Protocol"
EPILOG = """\
Examples:
  torchmem mcp
  torchmem mcp --exporter http://node7:9847

An assistant starts this command and talks to it on stdin and stdout. It ends at
the end of stdin. No tool changes anything.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--exporter",
        metavar="URL",
        help="ask this exporter for ranks, also with USER:PASSWORD@ before the host (default: read "
        "the run directory)",
    )
    add_run_directory(sources)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the end of stdin, and return the exit code.

    Raises MissingExtraError, or UsageError for the URL of an exporter that cannot be one.
    """
    from torchmem.cli.http import exporter_url
    from torchmem.mcp.worker import Source

    try:
        from torchmem.mcp.server import serve
    except ModuleNotFoundError as error:
        raise MissingExtraError("mcp", error.name or "", "mcp") from error
    exporter = None if arguments.exporter is None else exporter_url(arguments.exporter)
    directory = (arguments.run_dir or run_directory(os.environ)).absolute()
    serve(Source(str(directory), exporter))
    return 0
