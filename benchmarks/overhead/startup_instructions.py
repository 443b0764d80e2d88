"""Instructions of `import torchmem.sdk` and of `instrument()`, by callgrind.

    python -m benchmarks.overhead.startup_instructions      # needs valgrind; half a minute

The modules of Python's library that torch imports are imported before, as the script needs torch.
The allocator is simulated and CUDA is not initialized, as in a script that calls `instrument()`
first. Another checkout is measured with its source roots in PYTHONPATH.
"""

from __future__ import annotations

import os
import tempfile

from benchmarks.instructions import total

TORCH_IMPORTS = """
import argparse, ast, atexit, bisect, contextlib, copy, ctypes, dataclasses, difflib, dis, enum
import functools, gc, glob, gzip, importlib.resources, inspect, itertools, json, logging, math
import multiprocessing.util, operator, os, pathlib, pickle, platform, queue, random, re, signal
import socket, tempfile, textwrap, threading, traceback, types, typing, typing_extensions, uuid
import warnings, weakref
"""
SIMULATED = """
from torchmem.allocator.backend import Backend
"""
IMPORT = "import torchmem.sdk\n"
INSTRUMENT = """
class Idle(Backend):
    def is_initialized(self):
        return False
    def devices(self):
        return []
    def memory_stats(self, device):
        return None
    def memory_snapshot(self):
        return None
    def call_soon(self, call):
        pass
torchmem.sdk.instrument(backend=Idle(), run_dir=tempfile.mkdtemp())
"""


def main() -> None:
    """Print one line for each."""
    with tempfile.TemporaryDirectory(prefix="torchmem-benchmark-") as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        scripts = ("", IMPORT, f"{IMPORT}{SIMULATED}", f"{IMPORT}{SIMULATED}{INSTRUMENT}")
        # Twice, because the first run compiles the modules.
        counts = [
            min(total(TORCH_IMPORTS + script, environment) for _ in range(2)) for script in scripts
        ]
    print(f"import torchmem.sdk{counts[1] - counts[0]:16,} instructions")
    print(f"instrument(){counts[3] - counts[2]:23,} instructions")


if __name__ == "__main__":
    main()
