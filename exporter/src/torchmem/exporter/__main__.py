"""`python -m torchmem.exporter`, the same as `torchmem exporter`."""

from __future__ import annotations

import argparse
import sys

from torchmem.exporter import command
from torchmem.sample.errors import TorchmemError


def main() -> int:
    """Parse the flags, run, and report an error in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m torchmem.exporter", description=command.HELP)
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args())
    except TorchmemError as error:
        sys.stderr.write(f"torchmem: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
