"""The process that opens the pickle: it may use so much memory and time, holds no secrets, and answers in columns.

Answer on its stdout: one line of JSON (what was refused, or everything but the events), then the arrays of the events.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from torchmem.simulator.recording.columns import Columns
from torchmem.simulator.recording.content import Content, check
from torchmem.simulator.recording.refusal import RefusedError
from torchmem.simulator.recording.unpickle import load

# A byte of a snapshot becomes about 4 bytes of Python objects with stacks, up to 9 without.
BASE_BYTES, BYTES_PER_BYTE = 512 << 20, 12
# It reads about 30 MB a second; a slow or busy machine gets thirty times as long.
BASE_SECONDS, BYTES_PER_SECOND = 20, 1 << 20


def main() -> None:
    """Read the snapshot from stdin and answer on stdout."""
    size = os.fstat(0).st_size
    limit(resource.RLIMIT_AS, BASE_BYTES + BYTES_PER_BYTE * size)
    limit(resource.RLIMIT_CPU, BASE_SECONDS + size // BYTES_PER_SECOND)
    limit(resource.RLIMIT_CORE, 0)
    gc.disable()  # it would walk through millions of dicts again and again
    header: dict[str, Any]
    traces: Mapping[int, Columns] = {}
    try:
        content = check(load(sys.stdin.buffer), size)
        header, traces = _header(content), content.traces
    except RefusedError as error:
        header = {"refused": str(error)}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for columns in traces.values():
        for column in columns.arrays():
            column.tofile(sys.stdout.buffer)
    sys.stdout.buffer.flush()
    os._exit(0)  # without freeing millions of objects one by one


def limit(kind: int, most: int) -> None:
    """Lower one limit of this process, unless it is lower already."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _header(content: Content) -> dict[str, Any]:
    return {
        "settings": content.settings,
        "segments": [[device, list(map(astuple, segments))] for device, segments in content.segments.items()],
        "traces": [
            {
                "device": device,
                "events": len(columns.codes),
                "device_free": list(columns.device_free.items()),
                "pools": list(columns.pool_ids),
                "ignored": columns.ignored,
                "truncated": columns.truncated,
            }
            for device, columns in content.traces.items()
        ],
    }
