"""What ships: a wheel that works where only its base dependencies are installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.reports import STRANDED

from torchmem.allocator.oom_report import encode


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(root),
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A fresh environment with the wheel and its base dependencies only."""
    environment = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "--quiet", str(wheel)], check=True
    )
    return environment / "bin"


def test_the_wheel_holds_one_namespace(wheel: Path) -> None:
    """Both roots are in it, nothing else is, and the namespace has no `__init__.py` that would hide one of them."""
    names = zipfile.ZipFile(wheel).namelist()

    assert {"torchmem"} == {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert {
        "torchmem/sdk/py.typed",
        "torchmem/exporter/py.typed",
        "torchmem/sample/py.typed",
    } <= set(names)
    assert "torchmem/__init__.py" not in names


def test_the_sdk_imports_and_trains_without_torch(bare: Path) -> None:
    """In the base install the one line works, even where PyTorch is missing."""
    script = "from torchmem import sdk; sdk.instrument(); print('trained')"
    done = subprocess.run(
        [bare / "python", "-c", script], capture_output=True, text=True, check=False
    )

    assert (0, "trained\n") == (done.returncode, done.stdout)
    assert "torchmem watches nothing" in done.stderr


def test_the_command_helps_without_extras(bare: Path) -> None:
    """`torchmem --help` needs nothing beyond the base install."""
    done = subprocess.run(
        [bare / "torchmem", "--help"], capture_output=True, text=True, check=False
    )

    assert 0 == done.returncode
    assert "exporter" in done.stdout


def test_an_oom_is_explained_without_extras(bare: Path, tmp_path: Path) -> None:
    """`torchmem oom` reads a report in the base install."""
    (tmp_path / "report").write_bytes(encode(STRANDED))
    done = subprocess.run(
        [bare / "torchmem", "oom", tmp_path / "report"], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "expandable_segments:True" in done.stdout


@pytest.mark.parametrize(
    "command", [["exporter", "--once"], ["demo", "--duration", "1"]], ids=lambda c: c[0]
)
def test_a_command_that_needs_an_extra_names_it(bare: Path, command: list[str]) -> None:
    """Without its extra a command says in one sentence what to install, with exit code 2."""
    done = subprocess.run(
        [bare / "torchmem", *command], capture_output=True, text=True, check=False
    )

    assert 2 == done.returncode
    assert "pip install 'torchmem[exporter]'" in done.stderr
    assert 1 == len(done.stderr.strip().splitlines())
