"""What docs/operating.md and docs/install.md say agrees with what it comes from."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from support.promql import ROOT, rules

from torchmem.cli.main import command_line

PAGE = (ROOT / "docs" / "operating.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
SCALING = (ROOT / "docs" / "scaling.md").read_text()
COST = (ROOT / "docs" / "measurements" / "overhead.md").read_text()
MIB, KIB, DAY, INTERVAL = 1 << 20, 1 << 10, 86_400, 15
RETENTION_DAYS, GPUS_PER_NODE, BYTES_PER_SAMPLE = 15, 8, 2


def number(pattern: str, text: str) -> float:
    """Return the number in the only place of a text that matches the pattern."""
    (found,) = re.findall(pattern, text)
    return float(found.replace(",", ""))


def rates() -> tuple[float, float, float, float]:
    """Return the page's series per node, GPU and rank, and those recorded per rank."""
    (found,) = re.findall(r"= (\d+) N \+ (\d+) G \+ (\d+) R, and (\d+) for each rank", PAGE)
    node, gpu, rank, recorded = map(float, found)
    return node, gpu, rank, recorded


def memory_line() -> tuple[float, float]:
    """Return the page's MiB of an empty Prometheus, and its KiB per series."""
    (found,) = re.findall(r"= (\d+) MiB \+ ([\d.]+) KiB × series", PAGE)
    return float(found[0]), float(found[1])


def sized(gpus: int) -> list[float]:
    """Return series, samples/s, MiB and GB by the formula of the page."""
    node, gpu, rank, recorded = rates()
    nodes = max(1, gpus / GPUS_PER_NODE)
    series = node * nodes + (gpu + rank + recorded) * gpus
    base, each = memory_line()
    disk = series / INTERVAL * DAY * RETENTION_DAYS * BYTES_PER_SAMPLE
    return [series, series / INTERVAL, base + each * series / KIB, disk / 1e9]


def test_series_are_those_of_the_measurement() -> None:
    """The rates are those of docs/scaling.md; rules record 56 series per rank."""
    measured = [
        number(rf"\| per {what}[^|]*\| about (\d+) \|", SCALING) for what in ("node", "GPU", "rank")
    ]
    recorded = number(r"(?m)^\| 256 \| [\d,]+ \+ ([\d,]+) ", SCALING) / 256
    assert rates() == (*measured, pytest.approx(recorded, abs=0.5))


def test_memory_is_a_line_through_the_measurements() -> None:
    """Memory for 64 and 256 GPUs is what was measured, within 2%."""
    rows = re.findall(
        r"^\| (?:64|256) \|[^|]*\|[^|]*\| ([\d,]+) \| ([\d,]+) MiB",
        SCALING,
        re.MULTILINE,
    )
    base, each = memory_line()
    assert len(rows) == 2
    for series, mib in rows:
        expected = base + each * float(series.replace(",", "")) / KIB
        assert expected == pytest.approx(float(mib.replace(",", "")), rel=0.02)


def test_the_table_is_the_formula() -> None:
    """Each row of the table follows from the formula, rounded as shown."""
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", PAGE, re.MULTILINE
    )
    table = [[float(cell.replace(",", "")) for cell in row] for row in rows]
    assert [row[0] for row in table] == [1, 8, 64, 1000, 10_000]
    for gpus, *cells in table:
        series, samples, mib, disk = sized(int(gpus))
        assert cells == [round(series), round(samples), round(mib), round(disk, 1)]


def test_the_formula_is_near_the_measurement() -> None:
    """Samples per second of 256 GPUs are within 10% of those that were measured."""
    measured = number(r"(?m)^\| 256 \|[^|]*\| ([\d,]+) \|", SCALING)
    assert sized(256)[1] == pytest.approx(measured, rel=0.1)


def test_the_disk_of_compose() -> None:
    """Compose's disk limit holds its retention of as many GPUs as the page says."""
    flags = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]
    assert f"--storage.tsdb.retention.time={RETENTION_DAYS}d" in flags["command"]
    size = number(r"retention\.size=(\d+)GB", " ".join(flags["command"]))
    stated = number(r"hold 15 days of about (\d+) GPUs", PAGE)
    assert stated == pytest.approx(1000 * size / sized(1000)[3], abs=5)


def test_the_cost_of_the_exporter() -> None:
    """The cost of an exporter with eight ranks is that of measurements/overhead.md."""
    (row,) = re.findall(
        r"^\| 8 \| [\d,]+ \| \d+ \| ([\d.]+) \| (\d+) \| \d+ \| \d+ \|$", COST, re.MULTILINE
    )
    assert f"{row[1]} MiB and {row[0]} s of CPU time" in PAGE


def test_the_pause_that_an_upgrade_may_take() -> None:
    """The alert on a missing exporter waits as long as the page says."""
    alert = next(rule for rule in rules("alert") if rule["alert"] == "TorchmemExporterDown")
    assert f"TorchmemExporterDown waits for {alert['for'].removesuffix('m')} minutes" in PAGE


def test_podman_runs_the_image_of_compose() -> None:
    """The unit for Podman has the image, the port and the run directory of Compose."""
    (unit,) = re.findall(r"```ini\n(.*?)```", INSTALL, re.DOTALL)
    settings = set(unit.splitlines())
    exporter = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["exporter"]
    assert {
        f"Image={exporter['image']}",
        f"PublishPort={exporter['ports'][0]}",
        "Volume=/run/torchmem:/run/torchmem",
    } <= settings


def test_every_command_is_valid() -> None:
    """The parser accepts each command of torchmem, in blocks and in sentences."""
    lines = re.findall(r"/opt/torchmem/bin/torchmem ([^#\n]+)", INSTALL)
    spans = re.findall(r"`torchmem ([^`]+)`", PAGE + INSTALL)
    commands = [*lines, *(span for span in spans if "KIND" not in span)]
    assert len(commands) > 4
    for command in commands:
        assert callable(command_line().parse_args(shlex.split(command)).run), command


def test_the_backup_keeps_reports_only(tmp_path: Path) -> None:
    """The command archives reports and recordings of all users, and no samples."""
    (command,) = re.findall(r"^find /run/torchmem .*$", PAGE, re.MULTILINE)
    user = tmp_path / "run" / "1000"
    user.mkdir(parents=True)
    kept = {"a.oom.json", "a.oom.snapshot.pickle", "b c.oom.recording.pickle"}
    for name in kept | {"a.sample.json", "a.reserve"}:
        (user / name).write_text("")
    done = subprocess.run(
        ["sh", "-c", command.replace("/run/torchmem", "run")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    listed = subprocess.run(
        ["tar", "-tzf", str(archive)], capture_output=True, text=True, check=True
    )
    assert done.returncode == 0, done.stderr
    assert {Path(line).name for line in listed.stdout.splitlines()} == kept
