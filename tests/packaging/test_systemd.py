"""deploy/systemd: the unit is valid and sandboxed, and the exporter sees what it needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.needs import needs, skip_without

from torchmem.sample.run_directory import SYSTEM_RUN_DIR

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "torchmem-exporter.service"
MAX_EXPOSURE = 2.0  # of 10, by `systemd-analyze security`; 1.7 with systemd 252

needs_systemd = needs("systemd-analyze")
MOUNT = ROOT / "deploy" / "systemd" / "run-torchmem.mount"


def values(key: str) -> list[str]:
    """Return the values of a key in the unit, in order."""
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return the unit with a command that exists."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/torchmem/bin/torchmem", "/bin/true"))
    return unit


@needs_systemd
def test_systemd_accepts_the_unit(installed: Path) -> None:
    """`systemd-analyze verify` reports nothing."""
    done = subprocess.run(
        ["systemd-analyze", "verify", installed], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_mount_of_the_run_directory_is_valid() -> None:
    """`systemd-analyze verify` accepts the mount unit, and it is of the SDK's run directory."""
    done = subprocess.run(
        ["systemd-analyze", "verify", MOUNT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\nWhere={SYSTEM_RUN_DIR}\n" in MOUNT.read_text()


@needs_systemd
def test_the_unit_exposes_little(installed: Path) -> None:
    """`systemd-analyze security` reports an exposure of at most MAX_EXPOSURE."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert level, done.stderr
    assert float(level[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ProtectProc", "default"),
        ("ProcSubset", "all"),
        ("PrivateUsers", "no"),
        ("DevicePolicy", "closed"),
    ],
)
def test_the_exporter_sees_what_it_reads(key: str, value: str) -> None:
    """Other users' processes, the driver's /proc entries and the owners of files are visible."""
    assert values(key) == [value]
    assert not values("PrivateDevices")


def test_training_comes_first() -> None:
    """If the host runs out of memory, the exporter is killed first, and systemd restarts it."""
    assert int(values("OOMScoreAdjust")[0]) > 0
    assert values("Restart") == ["on-failure"]
    assert values("RestartPreventExitStatus") == ["2"]  # of UsageError


@needs_systemd
def test_the_run_directory_is_created(tmp_path: Path) -> None:
    """sysusers.d and tmpfiles.d create the SDK's run directory, owned by the exporter's user."""
    skip_without("systemd-sysusers", "systemd-tmpfiles")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (tmp_path / "etc" / "group").write_text("root:x:0:\n")
    for kind, flags in (("sysusers", []), ("tmpfiles", ["--create"])):
        command = [
            f"systemd-{kind}",
            f"--root={tmp_path}",
            *flags,
            str(ROOT / f"deploy/{kind}.d/torchmem.conf"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Operation not permitted" in done.stderr:
            pytest.skip("only root may change the owner of a directory")
        assert done.returncode == 0, done.stderr
    user = re.search(r"^torchmem:x:(\d+):", (tmp_path / "etc" / "passwd").read_text(), re.MULTILINE)
    created = (tmp_path / SYSTEM_RUN_DIR.relative_to("/")).stat()
    assert user
    assert (created.st_mode & 0o7777, created.st_uid) == (0o3777, int(user[1]))
    assert values("User") == ["torchmem"]
    assert values("ReadWritePaths") == [f"-{SYSTEM_RUN_DIR}"]
