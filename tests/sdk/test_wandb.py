"""Weights & Biases scrapes an endpoint with the settings of docs/integrations.md."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.exposition import Exposition
from support.stack import get
from support.waiting import until

from torchmem.sdk import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

BLOCK = 32 * 1024  # of the log format of LevelDB, which the file of a run has
RUN = """
import glob, time, wandb
run = wandb.init(mode="offline", settings=wandb.Settings(x_stats_sampling_interval=0.5))
until = time.monotonic() + 300
while time.monotonic() < until:
    run.log({"loss": 1})
    time.sleep(0.1)
    (file,) = glob.glob("wandb/offline-run-*/*.wandb")
    if b"openmetrics" in open(file, "rb").read():
        break
run.finish()
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs pip install wandb")
def test_the_settings_of_the_documentation(
    open_session: Callable[..., Session],
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    root: Path,
    tmp_path: Path,
) -> None:
    """The run's file has one series of each metric that the filters choose, with our values."""
    session = open_session(backend, run="gpt", port=0, interval=0.05, snapshot_interval=0.05)
    block = allocator.malloc(300 << 20)
    allocator.malloc(30 << 20)
    allocator.free(block)
    backend.step()
    url = until(lambda: session.url)
    until(lambda: "torchmem_headroom_bytes" in page(url).series)
    text = (root / "docs" / "integrations.md").read_text().split("```ini\n")[1].split("```")[0]
    (tmp_path / "wandb").mkdir()
    settings = text.replace("http://127.0.0.1:9847/metrics", url)
    (tmp_path / "wandb" / "settings").write_text(settings)
    subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "WANDB_SILENT": "true"},
        check=True,
        timeout=120,
    )

    (file,) = tmp_path.rglob("*.wandb")
    served = page(url)
    assert {
        "torchmem_allocated_peak_bytes": 330 << 20,
        "torchmem_reserved_peak_bytes": 330 << 20,
        "torchmem_fragmentation_ratio": served.value("torchmem_fragmentation_ratio"),
        "torchmem_alloc_retries_total": 0,
        "torchmem_headroom_bytes": served.value("torchmem_headroom_bytes", flush="true"),
        "torchmem_free_bytes": served.value("torchmem_free_bytes", state="stranded"),
    } == last_statistics(file)


def page(url: str) -> Exposition:
    """Scrape an endpoint."""
    return Exposition.of_text(get(url).decode())


def last_statistics(file: Path) -> dict[str, float]:
    """Return the newest value of each series of the endpoint, all of which have the number 0."""
    from wandb.proto import wandb_internal_pb2

    values: dict[str, Any] = {}
    for content in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        values |= {item.key: json.loads(item.value_json) for item in record.stats.item}
    pattern = re.compile(r"openmetrics\.torchmem\.(\w+)\.(\d+)")
    matches = {pattern.fullmatch(key): value for key, value in values.items()}
    found = {match: value for match, value in matches.items() if match}
    assert {match[2] for match in found} == {"0"}
    return {match[1]: value for match, value in found.items()}


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a run's file: 7 bytes, then fragments that do not cross a block.

    Source: doc/log_format.md of LevelDB.
    """
    position, record = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in {1, 4}:  # whole, or the last fragment
            yield record
            record = b""
