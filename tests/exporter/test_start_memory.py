"""What only the start of the exporter needs is given back."""

from __future__ import annotations

import subprocess
import sys

from torchmem.exporter.start_memory import unchanged_mappings

PROGRAM = """
import hashlib
import ssl  # a large library, most of which only its import runs
from pathlib import Path
from torchmem.exporter.start_memory import give_back

def of_files():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssFile:")[2].split()[0])

digest, before = hashlib.sha256(b"x").hexdigest(), of_files()
give_back()
assert of_files() < 0.8 * before, (of_files(), before)
assert hashlib.sha256(b"x").hexdigest() == digest
ssl.create_default_context()
"""
SMAPS = """\
1000-3000 r-xp 00001000 08:01 77                         /usr/lib/lib code.so
Size:                  8 kB
Private_Clean:         8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
3000-4000 r--p 00003000 08:01 77                         /usr/lib/relocated.so
Size:                  4 kB
Anonymous:             4 kB
VmFlags: rd mr mw me
4000-5000 rw-p 00004000 08:01 77                         /usr/lib/data.so
Size:                  4 kB
Anonymous:             0 kB
5000-6000 r--p 00000000 00:00 0
Size:                  4 kB
Anonymous:             0 kB
6000-7000 r--s 00000000 08:01 78                         /shared
Size:                  4 kB
Anonymous:             0 kB
7000-9000 r--p 00000000 08:01 79                         /usr/lib/constants.so
Size:                  8 kB
Anonymous:             0 kB
"""


def test_pages_of_libraries_that_only_the_start_needed_are_dropped() -> None:
    """A fifth or more of the resident pages of files goes, and the libraries work as before."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_only_pages_that_a_file_still_holds_are_dropped() -> None:
    """Pages that differ from their file, can be written or have no file stay."""
    assert list(unchanged_mappings(SMAPS)) == [(0x1000, 0x2000), (0x7000, 0x2000)]
