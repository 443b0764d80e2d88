"""`torchmem demo`: training on simulated (or, with --real, real) cards through the real SDK and exporter."""

from __future__ import annotations

import argparse

from torchmem.sample.errors import MissingExtraError

HELP = "show live allocator numbers of several ranks, without a GPU"
DEFAULT_SCENARIO = "fragmentation"
DEFAULT_DURATION_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--scenario", default=DEFAULT_SCENARIO, metavar="NAME", help="what the ranks do; see --list"
    )
    parser.add_argument("--list", action="store_true", help="describe the scenarios and exit")
    parser.add_argument(
        "--ranks",
        type=int,
        default=4,
        metavar="N",
        help="number of ranks, each with a card (default 4)",
    )
    parser.add_argument(
        "--duration", type=float, default=DEFAULT_DURATION_SECONDS, metavar="SECONDS",
        help="length of the whole story (default 300)",
    )  # fmt: skip
    parser.add_argument(
        "--loop", action="store_true", help="begin the story again when it is over, until Ctrl-C"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="same seed, same memory (default 0)"
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:9847",
        metavar="HOST:PORT",
        help="the exporter's address; port 0 takes any",
    )
    parser.add_argument(
        "--real", action="store_true", help="real tensors on this machine's GPUs; needs PyTorch"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code; raises MissingExtraError and UsageError."""
    try:
        from torchmem.demo.play import run
    except ModuleNotFoundError as error:
        raise MissingExtraError("demo", error.name or "") from error
    return run(arguments)
