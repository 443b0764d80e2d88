"""All attacks of a local user at once: bounded memory, complete scrapes, and no end."""

from __future__ import annotations

from pathlib import Path

from support.attacks import USERS, attackers, attacks, honest_scrape, peak_mib, publish
from support.exporter_process import exporter_process
from support.fake_nvml import FakeNode
from support.users import needs_root

from torchmem.sample.run_directory import RUN_DIR_MODE

MAX_MIB = 256
SCRAPES = 2
PATIENCE_SECONDS = 300.0


@needs_root
def test_a_local_user_does_not_blind_the_exporter(tmp_path: Path) -> None:
    """Under all attacks at once, scrapes are complete and the exporter stays below 256 MiB.

    `python -m benchmarks.exporter_attacks` measures each of them, with two such users.
    """
    tmp_path.chmod(0o755)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(RUN_DIR_MODE)
    publish(run_dir, USERS[0])
    node = FakeNode(tmp_path / "node", "h100_busy")
    with (
        exporter_process(node, run_dir) as exporter,
        attackers(exporter.url, attacks().values()),
    ):
        scrapes = [honest_scrape(exporter.url, PATIENCE_SECONDS)[0] for _ in range(SCRAPES)]
        peak, ended = peak_mib(exporter.popen.pid), exporter.popen.poll()

    assert (scrapes, ended) == ([True] * SCRAPES, None)
    assert peak < MAX_MIB
