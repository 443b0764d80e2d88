"""`torchmem exporter`: serve one page per node. The flags need no extra."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmem.sample.errors import MissingExtraError

HELP = "serve allocator and NVML metrics of this node to Prometheus"
EPILOG = """\
Examples:
  torchmem exporter --listen 0.0.0.0:9847
  torchmem exporter --once
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. A flag that is not given is None, so that the configuration file decides."""
    add = parser.add_argument
    _add_serving_arguments(parser)
    _add_reading_arguments(parser)
    _add_scheduler_arguments(parser)
    _add_price_arguments(parser)
    add("--config", metavar="FILE.yml", type=Path, help="settings in YAML; flags override them")
    add(
        "--thresholds",
        metavar="FILE.yml",
        help="thresholds of `torchmem manifests rules`, by which ranks are judged (default "
        "TORCHMEM_THRESHOLDS, else the shipped)",
    )
    add("--print-config", action="store_true", help="print the effective settings as YAML and exit")
    add("--once", action="store_true", help="print the metrics once on stdout and exit")


def _add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    add = group.add_argument
    add(
        "--listen",
        "--web.listen-address",
        metavar="HOST:PORT",
        help="address to serve on (default: 127.0.0.1:9847)",
    )
    add(
        "--web.config.file",
        dest="web_config_file",
        metavar="FILE.yml",
        help="TLS and passwords, in the format of Prometheus exporters",
    )
    add(
        "--web.systemd-socket",
        dest="systemd_socket",
        action="store_true",
        default=None,
        help="serve on the socket that systemd passes",
    )
    add(
        "--web-ui",
        action=argparse.BooleanOptionalAction,
        help="serve the live page at / (default: yes)",
    )
    add(
        "--web.allowed-host",
        dest="allowed_hosts",
        metavar="NAME",
        action="append",
        help="another host name by which local browsers may open the page; can be repeated",
    )
    add(
        "--otlp",
        action=argparse.BooleanOptionalAction,
        help="also send the metrics by OTLP, as set by the variables OTEL_EXPORTER_OTLP_*",
    )


def _add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    add = group.add_argument
    add("--run-dir", metavar="DIR", help="run directory that the training processes write to")
    add(
        "--ttl-seconds",
        metavar="N",
        type=_positive,
        help="how long to keep the last values of a process that ended (default: 900)",
    )
    add(
        "--scrape-deadline-seconds",
        metavar="N",
        type=_positive,
        help="how long to wait for the driver (default: 5)",
    )
    add(
        "--pcie-throughput",
        action=argparse.BooleanOptionalAction,
        help="measure PCIe throughput, which takes 40 ms for each GPU and scrape",
    )
    add(
        "--all-series",
        action=argparse.BooleanOptionalAction,
        help="also export the series of ranks that no rule or panel reads, and finer histograms",
    )
    add(
        "--processes-per-gpu",
        metavar="N",
        type=_count,
        help="maximum number of processes to export for each GPU (default: 32)",
    )


def _add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("names of pods")
    add = group.add_argument
    add(
        "--container-logs",
        metavar="DIR",
        help="where the kubelet links the logs of containers; no log is read "
        "(default: /var/log/containers)",
    )
    add(
        "--kubelet-socket",
        metavar="PATH",
        help="the kubelet's pod-resources socket; needs permission to connect and the extra "
        "`kubernetes`",
    )
    parser.add_argument_group("Slurm").add_argument(
        "--scontrol",
        metavar="PATH",
        help="Slurm's scontrol, to ask once for each job which GPUs it was given",
    )


def _add_price_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prices").add_argument
    add(
        "--gpu-hour-price",
        dest="gpu_hour_prices",
        metavar="MODEL=PRICE",
        type=_price,
        action="append",
        help="what an hour of a GPU costs, by a part of its name, such as H100=2.50; can be "
        "repeated, the longest part counts (default: unknown)",
    )
    add("--currency", metavar="CODE", help="the currency of the prices (default: USD)")


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed flags and return the exit code.

    Raises MissingExtraError when the extra is not installed, and UsageError for a flag or setting
    that cannot be used.
    """
    try:
        from torchmem.exporter import main
    except ModuleNotFoundError as error:
        raise MissingExtraError("exporter", error.name or "") from error
    return main.run(arguments)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 or more")
    return number


def _price(text: str) -> tuple[str, float]:
    model, _, price = text.rpartition("=")
    if not model:
        raise argparse.ArgumentTypeError(f"{text} is not MODEL=PRICE: write one such as H100=2.50")
    return model, _positive(price)


# argparse names the types in its own error messages.
_positive.__name__, _count.__name__ = "number", "whole number"
_price.__name__ = "price"
