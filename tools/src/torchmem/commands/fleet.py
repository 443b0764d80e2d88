"""`torchmem fleet`: what a fleet's GPU memory cost, from any Prometheus-compatible store."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.cli.http import bearer_token, server_url
from torchmem.output import html_files
from torchmem.output.terminal import StatusLine, write_out
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text

if TYPE_CHECKING:
    from torchmem.fleet.report import FleetReport

TOKEN_VARIABLE = "PROMETHEUS_TOKEN"  # noqa: S105 - a name
DEFAULT_ROWS = 20
MAX_DAYS = 400
HELP = "report what GPU memory cost a fleet: lost, stranded and idle GPU-hours"
EPILOG = f"""\
Any store with Prometheus' query API will do, such as Mimir, Thanos or
VictoriaMetrics. The recording rules of torchmem must be loaded. A bearer token
is in {TOKEN_VARIABLE} or --token-file.

Examples:
  torchmem fleet --prometheus http://prometheus:9090 --since 7d
  torchmem fleet --prometheus https://mimir/prometheus --html monday.html
  torchmem fleet --prometheus http://prometheus:9090 --csv > may.csv
"""
_DURATION = re.compile(r"(\d{1,6})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 168}
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~]*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add(
        "--prometheus",
        metavar="URL",
        required=True,
        help="the store, also with USER:PASSWORD@ before the host",
    )
    add("--since", metavar="TIME", default="30d", help="such as 12h, 7d or 4w (default: 30d)")
    add("--until", metavar="TIME", help="such as 2026-03-02T06:00Z (default: now)")
    add("--match", metavar="MATCHERS", default="", help="""only these series: 'cluster="a"'""")
    add("--token-file", metavar="FILE", type=Path, help=f"token (default: {TOKEN_VARIABLE})")
    add(
        "--header",
        metavar="NAME:VALUE",
        action="append",
        default=[],
        help="a header of each request, such as X-Scope-OrgID:ml",
    )
    add(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="how long one query may take (default: 60)",
    )
    add(
        "--rows",
        metavar="N",
        type=int,
        default=DEFAULT_ROWS,
        help="rows of a table at most (default: %(default)s)",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print everything as JSON")
    formats.add_argument(
        "--csv", action="store_true", help="print GPU-hours and costs by run and owner as CSV"
    )
    add("--html", metavar="FILE", type=Path, help="write a page (- for stdout)")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code. Raise UsageError."""
    if arguments.html:
        html_files.check(arguments.html)
    report = _report(arguments)
    if arguments.html:
        from torchmem.fleet.html import page

        html_files.write(page(report, arguments.rows), arguments.html)
    if arguments.html != html_files.STDOUT:
        write_out(_words(report, arguments))
    return 0


def _report(arguments: argparse.Namespace) -> FleetReport:
    from torchmem.fleet.reading import StoreReader
    from torchmem.fleet.report import report
    from torchmem.fleet.store import Store, Window

    if not 0 < arguments.timeout <= 3600 or not math.isfinite(arguments.timeout):
        raise UsageError("--timeout must be more than 0 and at most 3600 seconds.")
    if arguments.rows < 1:
        raise UsageError("--rows must be at least 1.")
    example = "http://HOST:9090"
    url = server_url(arguments.prometheus, "a Prometheus-compatible store", example)
    end = _until(arguments.until)
    window = Window(end - _seconds(arguments.since), end)
    with StatusLine() as status:
        store = Store(url, _headers(arguments), arguments.timeout)
        past = StoreReader(
            store,
            window,
            arguments.match.strip().removeprefix("{").removesuffix("}"),
            lambda label, done, total: status.show(lambda: label, done, total),
        ).past()
    if not past.processes and not past.all_gpus:
        raise UsageError(
            f"the store has no series of torchmem in the last {arguments.since}: check "
            "--prometheus, --since and --match, and that Prometheus scrapes the exporters."
        )
    return report(past)


def _words(report: FleetReport, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return json.dumps(document(report), allow_nan=False) + "\n"
    if arguments.csv:
        from torchmem.fleet.spreadsheet import table

        return table(report)
    from torchmem.fleet import markdown

    return markdown.page(report, arguments.rows)


def document(report: FleetReport) -> dict[str, Any]:
    """Return the report for JSON: its fields, with the headline and the counts of endings."""
    from dataclasses import asdict

    from torchmem.fleet.markdown import headline

    ooms = [
        {"cause": cause or None, "onset": onset or None, "launches": number}
        for (cause, onset), number in report.ooms().items()
    ]
    return {
        "headline": headline(report),
        **asdict(report),
        "outcomes": dict(report.outcomes()),
        "ooms": ooms,
    }


def _seconds(text: str) -> int:
    """Return the seconds of a duration such as 30d. Raise UsageError."""
    matched = _DURATION.fullmatch(text.strip())
    hours = int(matched[1]) * _HOURS[matched[2]] if matched else 0
    if not 0 < hours <= MAX_DAYS * 24:
        raise UsageError(
            f"--since {sanitize_text(text)} is not a time of at most {MAX_DAYS} days: write hours, "
            "days or weeks, such as 12h, 7d or 4w."
        )
    return hours * 3600


def _until(text: str | None) -> int:
    """Return a full minute in Unix seconds. Raise UsageError."""
    if text is None:
        return int(time.time()) // 60 * 60
    try:
        # fromisoformat reads a Z only since Python 3.11.
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        seconds = moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()
    except (ValueError, OverflowError):
        seconds = -1
    if seconds <= 0:
        raise UsageError(
            f"--until {sanitize_text(text)} is not a time: write one such as 2026-03-02T06:00Z."
        )
    return int(seconds) // 60 * 60


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the headers of all requests. Raise UsageError, which shows no value."""
    headers = {}
    token = bearer_token(arguments.token_file, TOKEN_VARIABLE)
    if arguments.token_file and not token:
        raise UsageError(f"there is no token in {arguments.token_file}: check --token-file.")
    if token:
        headers["Authorization"] = f"Bearer {token}"
    for text in arguments.header:
        matched = _HEADER.fullmatch(text.strip())
        if matched is None:
            raise UsageError(
                "--header needs a name, a colon and printable ASCII characters: write "
                "--header X-Scope-OrgID:NAME."
            )
        headers[matched[1]] = matched[2]
    return headers
