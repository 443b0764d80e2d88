"""`torchmem doctor`: check everything between a training process and Prometheus."""

from __future__ import annotations

import argparse
import os

from torchmem.cli.flags import add_exporter, add_run_directory
from torchmem.cli.http import exporter_url, server_url
from torchmem.doctor.check import Place
from torchmem.output.terminal import write_out

HELP = "check everything between a training process and Prometheus, and say what to fix"
EPILOG = """\
Examples:
  torchmem doctor
  torchmem doctor --prometheus http://prometheus:9090 --json

Exit code: 0 if no problem was found, 1 otherwise.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add_exporter(parser)
    add("--prometheus", metavar="URL", help="address of Prometheus (default: not checked)")
    add_run_directory(parser)
    add("--json", action="store_true", help="print the checks as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; return 1 if one of them found a problem. Raise UsageError for a bad URL."""
    from torchmem.doctor import check_list, gpus, node, servers, software

    exporter = exporter_url(arguments.exporter)
    prometheus = arguments.prometheus and server_url(
        arguments.prometheus, "Prometheus", "http://HOST:9090"
    )
    place = Place(os.environ, exporter, prometheus, arguments.run_dir)
    checks = [
        *software.checks(place.environment),
        *gpus.checks(place),
        *node.checks(place),
        *servers.checks(place),
    ]
    write_out(check_list.document(checks) if arguments.json else check_list.page(checks))
    return int(any(check.status == "problem" for check in checks))
