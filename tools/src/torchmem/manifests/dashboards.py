"""`torchmem manifests dashboards`: write Grafana's dashboards, or save them in a Grafana."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from torchmem.sample.errors import UsageError, did_you_mean

TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105 - a name
FOLDER = "torchmem"
# Variables of the dashboards that are hidden, because Grafana cannot hide those without values.
OPTIONAL = ("cluster", "namespace", "team", "user")
HELP = "write Grafana's dashboards to files, or save them in a Grafana"
EPILOG = f"""\
The token of a Grafana service account is in {TOKEN_VARIABLE} or --token-file.

Examples:
  torchmem manifests dashboards --out dashboards
  torchmem manifests dashboards --grafana https://grafana.example.org
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="the directory to write to")
    target.add_argument("--grafana", metavar="URL", help="the Grafana to save them in")
    add("--token-file", type=Path, metavar="FILE", help=f"the token (default: {TOKEN_VARIABLE})")
    add(
        "--folder",
        default=FOLDER,
        metavar="TITLE",
        help="the folder in Grafana, made if it is missing (default: %(default)s)",
    )
    add(
        "--datasource",
        metavar="NAME",
        help="name or UID of the Prometheus data source (default: Grafana's default)",
    )
    add(
        "--show",
        metavar="LABELS",
        type=_labels,
        default=(),
        help="variables that are hidden unless your series have such a label: "
        f"{', '.join(OPTIONAL)}",
    )
    add("--force", action="store_true", help="replace dashboards that you may have changed")


def run(arguments: argparse.Namespace) -> int:
    """Write or upload the dashboards, print where they are, and return the exit code.

    Raises UsageError and TorchmemError.
    """
    from torchmem.manifests import shipped, writing

    paths = shipped.paths(shipped.root(), "grafana")
    boards = writing.read(
        {PurePosixPath(path).name: path for path in paths if path.endswith(".json")}
    )
    boards = {name: shown(board, arguments.show) for name, board in boards.items()}
    if arguments.grafana is not None:
        return _upload(arguments, list(boards.values()))
    replaced = writing.write(arguments.out, boards, force=arguments.force)
    writing.report(arguments.out, len(boards), replaced)
    print("Import them in Grafana, or give its URL with --grafana.")
    return 0


def shown(board: bytes, labels: Collection[str]) -> bytes:
    """Return a dashboard that shows the variables of some labels, of those that are OPTIONAL."""
    if not labels:
        return board
    parsed = json.loads(board)
    for variable in parsed["templating"]["list"]:
        if variable["name"] in labels:
            variable.pop("hide", None)
    return json.dumps(parsed, indent=2).encode() + b"\n"


def _labels(text: str) -> tuple[str, ...]:
    labels = tuple(label.strip() for label in text.split(","))
    for label in labels:
        if label not in OPTIONAL:
            hint = did_you_mean(label, OPTIONAL, f"give some of {', '.join(OPTIONAL)}.")
            raise argparse.ArgumentTypeError(f"there is no label {label!r}: {hint}")
    return labels


def _upload(arguments: argparse.Namespace, boards: list[bytes]) -> int:
    from torchmem.manifests.grafana import Grafana

    grafana = Grafana(_url(arguments.grafana), _token(arguments.token_file))
    parsed = [json.loads(board) for board in boards]
    urls = grafana.upload(parsed, arguments.folder, arguments.datasource, force=arguments.force)
    print("\n".join(urls))
    return 0


def _url(text: str) -> str:
    """Return Grafana's URL without a slash at its end. Raises UsageError."""
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError("--grafana needs a URL that starts with http:// or https://.")
    if "@" in parts.netloc:
        raise UsageError(
            "--grafana takes no password: remove it from the URL, and give the token of a service "
            f"account in {TOKEN_VARIABLE} or --token-file."
        )
    return parts._replace(query="", fragment="").geturl().rstrip("/")


def _token(file: Path | None) -> str:
    """Return the token. Raises UsageError."""
    from torchmem.cli.http import bearer_token

    token = bearer_token(file, TOKEN_VARIABLE)
    if not token:
        raise UsageError(
            f"there is no token: set {TOKEN_VARIABLE}, or give --token-file, with the token of a "
            "Grafana service account."
        )
    return token
