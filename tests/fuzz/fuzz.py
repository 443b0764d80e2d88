"""Coverage-guided fuzzing of one parser with Google's atheris, which the tests do not need.

    pip install atheris
    python tests/fuzz/fuzz.py sample_file -max_total_time=120

The names are those of TARGETS in tests/support/fuzz.py; further arguments go to libFuzzer.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path


def main() -> int:
    """Run libFuzzer, which writes the input of a crash to the current directory."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["torchmem", "yaml", "support"]):
        targets = importlib.import_module("support.fuzz").TARGETS
    if len(sys.argv) < 2 or sys.argv[1] not in targets:
        sys.stderr.write(
            f"usage: python {sys.argv[0]} {{{','.join(targets)}}} [libFuzzer options]\n"
        )
        return 2
    logging.disable()
    check = targets[sys.argv[1]].check
    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda content: bool(check(content)) and None)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
