"""The first files that a new exporter decodes, in several threads at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.maps import full_map
from support.samples import full_sample

from torchmem.sample.memory_map import encode as encode_map
from torchmem.sample.sample import encode

SCRIPT = """
import os, sys, threading
from pathlib import Path
from torchmem.exporter.live import map_file
from torchmem.exporter.sample_files import decode

DECODE = {"sample": decode, "map": lambda data: map_file.checked(data, 1.8e9)}[sys.argv[1]]
DATA = Path(sys.argv[2]).read_bytes()
CHILDREN, THREADS = 24, 16

def decode_at_once():
    sys.setswitchinterval(1e-6)
    barrier = threading.Barrier(THREADS)
    def run():
        barrier.wait()
        DECODE(DATA)
    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def status():
    pid = os.fork()  # so that each attempt is the first one of its process
    if pid == 0:
        decode_at_once()
        os._exit(0)
    return os.waitpid(pid, 0)[1]

print(sum(status() != 0 for _ in range(CHILDREN)))
"""


@pytest.mark.parametrize("kind", ["sample", "map"])
def test_threads_may_decode_at_once(tmp_path: Path, kind: str) -> None:
    """No thread meets a decoder that another one is still building, which ends the process."""
    file = tmp_path / kind
    file.write_bytes(encode(full_sample()) if kind == "sample" else encode_map(full_map()))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, file], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("0", "")
