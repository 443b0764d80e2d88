"""Measure what sending by OTLP costs (the setting `otlp`, and `torchmem exporter --otlp`):

    PYTHONPATH=tests python -m benchmarks.otlp

CPU milliseconds of one send, from the sample to the receiver's answer, for one rank and for an
exporter with eight ranks, and of the imports, once. The receiver is another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.samples import full_sample

from torchmem.metrics.families import ProcessView, families

SENDS = 50
RECEIVER = """
import sys
from support.otlp import receiver
with receiver() as received:
    print(received.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def receiver() -> Iterator[str]:
    """Run a receiver in a process of its own; yield its URL."""
    command = [sys.executable, "-c", RECEIVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        yield process.stdout.readline().decode().strip()
        assert process.stdin
        process.stdin.close()


def main() -> None:
    """Print the figures."""
    before = time.process_time()
    from torchmem.metrics.otlp import Conversion, exporter, resource

    exporter({})
    print(f"imports                {1000 * (time.process_time() - before):6.1f} ms CPU")
    with receiver() as url:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
        sender = exporter({})
        for ranks in (1, 8):
            views = [ProcessView(full_sample(rank=r), 100 + r, "running", {}) for r in range(ranks)]
            conversion = Conversion(resource({}))
            sender.export(conversion.convert(families(views)))
            before = time.process_time()
            for _ in range(SENDS):
                sender.export(conversion.convert(families(views)))
            spent = 1000 * (time.process_time() - before) / SENDS
            print(f"one send of {ranks} rank(s)  {spent:6.1f} ms CPU")


if __name__ == "__main__":
    main()
