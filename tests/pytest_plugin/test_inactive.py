"""The plugin in a pytest without a GPU and without the CUDA build of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.pytest_plugin.server import ending
from torchmem.pytest_plugin.session import skipped_at_import

TESTS = """
import sys
import pytest

@pytest.mark.gpu_memory(peak="1 GiB")
def test_marked():
    assert "torch" not in sys.modules

def test_with_fixture(gpu_memory):
    pass

def test_imports_are_few():
    assert not [name for name in sys.modules if name in ("torch", "torchmem.preflight.run")]
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin in a folder with tests, and nothing of this repository's."""
    command = [sys.executable, "-m", "pytest", "-p", "torchmem.pytest_plugin.plugin", "-rA"]
    # cloudcoil, which other tests need, has a plugin that needs more than it installs.
    plugins = "-p no:torchmem -p no:cloudcoil"
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = {plugins} --strict-markers\n")
    return subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_memory.py").write_text(TESTS)
    return folder


def test_without_the_option(folder: Path) -> None:
    """Without --gpu-memory the marker limits nothing, the fixture skips, nothing is imported."""
    done = run(folder)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout
    assert "run pytest with --gpu-memory" in done.stdout


def test_without_the_cuda_build(folder: Path) -> None:
    """Without PyTorch, or with its CPU build, each measured test fails with what to install."""
    done = run(folder, "--gpu-memory", "-k", "not imports")
    if "2 passed" in done.stdout:
        pytest.skip("this Python has the CUDA build of PyTorch")
    assert "2 failed" in done.stdout, done.stdout
    assert "install the CUDA build with" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpu-memory-baseline", "none.json"), "there is no baseline none.json: save one first"),
        (
            ("--gpu-memory-tolerance", "2"),
            "'2' is not a tolerance: write it in percent, such as 2%",
        ),
        (("--gpu-memory-save-baseline", "no/b.json"), "there is no directory no: create it first."),
    ],
)
def test_wrong_options(folder: Path, arguments: tuple[str, ...], sentence: str) -> None:
    """A wrong option is one sentence and pytest's exit code for wrong usage."""
    done = run(folder, "--gpu-memory", *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_marker(tmp_path: Path) -> None:
    """A wrong marker is one sentence with the test's id, before any test runs."""
    marked = 'import pytest\n@pytest.mark.gpu_memory(peek="1 GiB")\ndef test_it():\n    pass\n'
    (tmp_path / "test_it.py").write_text(marked)
    done = run(tmp_path, "--gpu-memory")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "test_it.py::test_it: gpu_memory has no limit 'peek': did you mean 'peak'?" in done.stderr
    )


def test_modules_that_skip_themselves(tmp_path: Path) -> None:
    """A module that skips its measured tests for want of a GPU is named, any other is not."""
    path = tmp_path / "test_it.py"
    path.write_text("if not torch.cuda.is_available(): skip()\n# gpu_memory")
    assert str(skipped_at_import(path)).startswith("test_it.py skips all its tests at import")
    path.write_text("pytest.importorskip('flash_attn')\n# gpu_memory")
    assert skipped_at_import(path) is None


def test_why_a_test_did_not_end() -> None:
    """A killed process, an early exit and a dead server each have a sentence of their own."""
    assert ending(-9).startswith("the test's process was killed by SIGKILL: if this machine ran")
    assert ending(-11).startswith("the test's process was killed by SIGSEGV: run it alone")
    assert ending(3).startswith("the test's process exited with code 3 before the test ended")
    assert "has ended" in ending(None)
