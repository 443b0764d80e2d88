"""deploy/systemd: systemd accepts the unit, it is locked down, and what the exporter has to see stays visible."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torchmem.sample.run_directory import RUN_DIR_MODE, SYSTEM_RUN_DIR

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "torchmem-exporter.service"
LARGEST_EXPOSURE = 2.0  # of 10, by `systemd-analyze security`; 1.6 with systemd 252

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd"
)


def values(key: str) -> list[str]:
    """What the unit sets `key` to, in order."""
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit as on a machine where the command is installed."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/torchmem/bin/torchmem", "/bin/true"))
    return unit


@needs_systemd
def test_systemd_accepts_the_unit(installed: Path) -> None:
    """`systemd-analyze verify` has nothing to say."""
    done = subprocess.run(
        ["systemd-analyze", "verify", installed], capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)


@needs_systemd
def test_the_unit_exposes_little(installed: Path) -> None:
    """The exposure level by systemd's own measure does not grow."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= LARGEST_EXPOSURE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ProtectProc", "default"),
        ("ProcSubset", "all"),
        ("PrivateUsers", "no"),
        ("DevicePolicy", "closed"),
    ],
)
def test_what_the_exporter_has_to_see_stays_visible(key: str, value: str) -> None:
    """Other users' processes, the driver's /proc entries and the true owners of files are not hidden from it."""
    assert values(key) == [value]
    assert not values("PrivateDevices")


def test_training_comes_first() -> None:
    """When memory is short the kernel takes the exporter first, which comes back and has lost nothing."""
    assert int(values("OOMScoreAdjust")[0]) > 0
    assert values("Restart") == ["on-failure"]
    assert values("RestartPreventExitStatus") == ["2"]  # of UsageError


@needs_systemd
def test_the_run_directory_is_there_before_the_exporter(tmp_path: Path) -> None:
    """sysusers.d and tmpfiles.d make the directory for all users, owned by the exporter's user, where the SDK looks."""
    if shutil.which("systemd-sysusers") is None or shutil.which("systemd-tmpfiles") is None:
        pytest.skip("needs systemd-sysusers and systemd-tmpfiles: apt-get install systemd")
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
            pytest.skip("only root may give a directory away")
        assert done.returncode == 0, done.stderr
    user = re.search(r"^torchmem:x:(\d+):", (tmp_path / "etc" / "passwd").read_text(), re.MULTILINE)
    made = (tmp_path / SYSTEM_RUN_DIR.relative_to("/")).stat()
    assert user
    assert (made.st_mode & 0o7777, made.st_uid) == (RUN_DIR_MODE, int(user[1]))
    assert values("User") == ["torchmem"]
    assert values("ReadWritePaths") == [f"-{SYSTEM_RUN_DIR}"]
