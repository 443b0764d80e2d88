"""The memory of the exporter, as a process, while three users attack it at the same time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support.exporter_process import ExporterProcess, exporter_process
from support.fake_nvml import FakeNode
from support.publishing import own_sample
from support.scrape_limits import NODE_LIMITS
from support.users import as_user, needs_root

from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import Process, Sample, encode
from torchmem.sdk.publish.sample_file import make_user_directory

VICTIM = 61001
MAX_BYTES = 256 << 20
RANKS = 8
SCRAPES = 3


def ended(run: str, rank: int, devices: int = 1) -> Sample:
    """Return the last sample of a process with so many devices."""
    device = own_sample().devices[0]
    every = tuple(replace(device, index=n, uuid=f"GPU-{n}") for n in range(devices))
    process = Process(4_000_000 + rank, None, 1, "h", run, rank)
    return own_sample(process=process, devices=every, ended="exited")


def many_new_ranks(directory: Path, number: int) -> None:
    """Replace 1000 small processes by others with new names."""
    for rank in range(1000):
        content = encode(ended(f"{number}-{rank}", rank))
        (directory / f"{rank}{SAMPLE_SUFFIX}").write_bytes(content)


def large_samples(directory: Path, number: int) -> None:
    """Publish processes with 60 devices each and long names."""
    for rank in range(100):
        content = encode(ended(f"{number}" + '"' * 190, rank, devices=60))
        (directory / f"{rank}{SAMPLE_SUFFIX}").write_bytes(content)


def many_names(directory: Path, number: int) -> None:
    """Create names of directories and files, and nested JSON of the largest size."""
    for name in range(1000):
        (directory / f"{number}-{name}{SAMPLE_SUFFIX}").touch()
        (directory.parent / f"{os.geteuid()}-{number:04x}{name:012x}").mkdir()
    for name in range(30):
        content = b"[" + b"[0]," * 60_000 + b"0]"
        (directory / f"nested{name}{SAMPLE_SUFFIX}").write_bytes(content)


ATTACKS: dict[int, Callable[[Path, int], None]] = {
    61002: many_new_ranks,
    61003: large_samples,
    61004: many_names,
}


def publish_ranks(run_dir: Path) -> None:
    """Publish eight ranks as the SDK does."""
    directory = make_user_directory(run_dir)
    for rank in range(RANKS):
        (directory / f"{rank}{SAMPLE_SUFFIX}").write_bytes(encode(ended("night", rank)))


def peak_bytes(exporter: ExporterProcess) -> int:
    """Return the most memory that the process has had so far."""
    status = Path(f"/proc/{exporter.popen.pid}/status").read_text()
    (kibibytes,) = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(kibibytes) << 10


@needs_root
def test_three_hostile_users(shared_dir: Path, tmp_path: Path) -> None:
    """The memory stays below the limit, the page below Prometheus' limits, and ranks are shown."""
    as_user(VICTIM, lambda: publish_ranks(shared_dir))
    with exporter_process(FakeNode(tmp_path / "node", "h100_busy"), shared_dir) as exporter:
        for number in range(SCRAPES):
            for user, attack in ATTACKS.items():
                as_user(
                    user,
                    lambda attack=attack, number=number: attack(  # type: ignore[misc]
                        make_user_directory(shared_dir), number
                    ),
                )
            page, state = exporter.get(), exporter.get("/api/v1/state")
        peak = peak_bytes(exporter)

    rows = [line for line in page.splitlines() if not line.startswith("#")]
    shown = [row for row in rows if row.startswith("torchmem_process_state") and '"night"' in row]
    assert sum('state="exited"' in row and row.endswith(" 1.0") for row in shown) == RANKS
    assert '"night"' in state
    assert len(rows) < int(NODE_LIMITS["sample_limit"])
    assert len(page) < int(str(NODE_LIMITS["body_size_limit"]).removesuffix("MB")) << 20
    assert peak < MAX_BYTES
