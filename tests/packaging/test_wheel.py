"""The wheel works with only its base dependencies."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.reports import STRANDED

from torchmem.explain.oom_report import encode


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """Build the wheel from this checkout and return its path."""
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
    """Install the wheel with its base dependencies and return the environment's bin folder."""
    environment = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "--quiet", str(wheel)], check=True
    )
    return environment / "bin"


def test_the_wheel_holds_one_namespace(wheel: Path) -> None:
    """The wheel contains all source roots, nothing else, and no `torchmem/__init__.py`."""
    names = zipfile.ZipFile(wheel).namelist()

    roots = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert roots == {"torchmem", "torchmem-autostart.pth"}
    assert {
        "torchmem/sdk/py.typed",
        "torchmem/exporter/py.typed",
        "torchmem/sample/py.typed",
        "torchmem/exporter/live/static/index.html",
        "torchmem/exporter/live/static/uplot-license.txt",
    } <= set(names)
    assert "torchmem/__init__.py" not in names


def test_the_sdk_imports_and_trains_without_torch(bare: Path) -> None:
    """In the base install `sdk.instrument()` works, even without PyTorch."""
    script = "from torchmem import sdk; sdk.instrument(); print('trained')"
    done = subprocess.run(
        [bare / "python", "-c", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "torchmem is inactive" in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True\n"), ("0", "False\n"), ("", "False\n")]
)
def test_a_variable_alone_is_enough(bare: Path, value: str, expected: str) -> None:
    """With TORCHMEM=1 every Python of the environment waits for torch, isolated ones too."""
    script = "import sys; print('torchmem.run.autostart' in sys.modules)"
    done = subprocess.run(
        [bare / "python", "-I", "-c", script],
        env={"TORCHMEM": value},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_the_command_helps_without_extras(bare: Path) -> None:
    """`torchmem --help` works in the base install."""
    done = subprocess.run(
        [bare / "torchmem", "--help"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0
    assert "exporter" in done.stdout


def test_an_oom_is_explained_without_extras(bare: Path, tmp_path: Path) -> None:
    """`torchmem oom` explains a report in the base install, as text and as a page."""
    (tmp_path / "report").write_bytes(encode(STRANDED))
    done = subprocess.run(
        [bare / "torchmem", "oom", tmp_path / "report", "--html", tmp_path / "oom.html"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "expandable_segments:True" in done.stdout
    assert "</html>" in (tmp_path / "oom.html").read_text()


@pytest.mark.parametrize(
    "command",
    [["exporter", "--once"], ["demo", "--duration", "1"], ["top", "--once"]],
    ids=lambda c: c[0],
)
def test_a_command_that_needs_an_extra_names_it(bare: Path, command: list[str]) -> None:
    """A command without its extra prints in one sentence what to install; the exit code is 2."""
    done = subprocess.run(
        [bare / "torchmem", *command], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "pip install 'torchmem[exporter]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
