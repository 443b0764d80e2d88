"""The PyTorch that a command uses, and the error if it cannot run on a phantom GPU."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from torchmem.phantom.torch_build import TorchBuild, cuda_build, find_torch, script_interpreter
from torchmem.sample.errors import UsageError

PYTHON = [sys.executable, "train.py"]


def environment_with(
    tmp_path: Path, version: str | None, cuda: str | None = None
) -> dict[str, str]:
    """Return an environment with this PyTorch first on the path; importing it would fail."""
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('PyTorch was imported')")
    if version:
        (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    return {**os.environ, "PYTHONPATH": str(folder.parent)}


def test_a_cuda_build_is_found_without_importing_it(tmp_path: Path) -> None:
    """Version, CUDA and folder are those of the interpreter in the command."""
    build = cuda_build(PYTHON, environment_with(tmp_path, "2.13.0+cu130", "13.0"))

    assert TorchBuild("2.13.0+cu130", "13.0", tmp_path / "site" / "torch") == build


@pytest.mark.parametrize(
    ("version", "cuda", "reason"),
    [
        ("2.13.0+cpu", None, "PyTorch 2.13.0+cpu, a build without CUDA"),
        (
            "2.6.0+cu118",
            "11.8",
            "PyTorch 2.6.0+cu118 for CUDA 11.8, but the phantom GPU supports CUDA 12 and 13",
        ),
        ("2.3.1+cu121", "12.1", "PyTorch 2.3.1+cu121, but the phantom GPU needs 2.4 or newer"),
    ],
)
def test_an_unsupported_build_is_a_usage_error(
    tmp_path: Path, version: str, cuda: str | None, reason: str
) -> None:
    """The error says what is installed, what is needed, and how to install it."""
    with pytest.raises(UsageError) as caught:
        cuda_build(PYTHON, environment_with(tmp_path, version, cuda))

    remedy = f"{sys.executable} -m pip install 'torch===2.13.0'"
    assert (
        str(caught.value) == f"{sys.executable} has {reason}: install the CUDA build with {remedy}"
    )


@pytest.mark.parametrize("version", ["2.4.0", "2.15.0+cu132", "3.0.1a0+git12"])
def test_newer_builds_are_accepted(tmp_path: Path, version: str) -> None:
    """Version 2.4 and newer are accepted with any suffix."""
    build = cuda_build(PYTHON, environment_with(tmp_path, version, "12.4"))

    assert build is not None
    assert version == build.version


def test_no_pytorch_is_none(tmp_path: Path) -> None:
    """An interpreter without PyTorch is not an error."""
    venv.create(tmp_path / "bare")

    assert find_torch(str(tmp_path / "bare/bin/python"), {}) is None


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("syntax error(", "SyntaxError"), ("raise RuntimeError('no')", "RuntimeError: no")],
)
def test_a_broken_pytorch_is_a_usage_error(tmp_path: Path, broken: str, reason: str) -> None:
    """A version.py that fails gives an error with the interpreter and the reason."""
    environment = environment_with(tmp_path, "2.13.0", "13.0")
    (tmp_path / "site" / "torch" / "version.py").write_text(broken)

    with pytest.raises(UsageError, match=rf"cannot find out which PyTorch .* has \(.*{reason}"):
        cuda_build(PYTHON, environment)


def script(folder: Path, text: str) -> list[str]:
    """Return a command that runs a script with this text."""
    path = folder / "launcher"
    path.write_text(text)
    path.chmod(0o755)
    return [str(path), "train.py"]


@pytest.mark.parametrize(
    "first",
    [
        "#!{python}\n",
        "#!/usr/bin/env python3\n",
        "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_launcher_uses_the_python_of_its_first_line(tmp_path: Path, first: str) -> None:
    """The first line of torchrun or accelerate decides, also in pip's form for long paths."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    environment = {"PATH": str(tmp_path / "bin")}

    python = script_interpreter(
        script(tmp_path, first.format(python=tmp_path / "bin" / "python3")), environment
    )

    assert str(tmp_path / "bin" / "python3") == python


@pytest.mark.parametrize(
    "text", ["#!/bin/bash\npython train.py\n", "", "\x7fELF\n", "#!\n", "#!'\n"]
)
def test_other_programs_have_no_interpreter(tmp_path: Path, text: str) -> None:
    """The python on PATH is used for them."""
    assert script_interpreter(script(tmp_path, text), os.environ) is None


@pytest.mark.parametrize(
    ("command", "reason"), [([], "no command"), (["./not-there"], "cannot run './not-there'")]
)
def test_a_missing_command_is_a_usage_error(command: list[str], reason: str) -> None:
    """It is not reported as a missing PyTorch."""
    with pytest.raises(UsageError, match=reason):
        cuda_build(command, os.environ)


@pytest.mark.parametrize("first", ["#!/bin/sh", "#!{python}"])
def test_a_wrapper_uses_the_python_on_path_if_that_is_usable(tmp_path: Path, first: str) -> None:
    """Behind a shell, or a Python without PyTorch, the guess is the `python` on PATH, or none."""
    venv.create(tmp_path / "bare")
    wrapper = script(tmp_path, first.format(python=tmp_path / "bare" / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    environment = {"PATH": str(tmp_path / "bin")}
    assert cuda_build(wrapper, environment) is None
    python.write_text('#!/bin/sh\necho \'["2.13.0", "13.0", "/torch"]\'')
    python.chmod(0o755)
    assert cuda_build(wrapper, environment) == TorchBuild("2.13.0", "13.0", Path("/torch"))
    python.write_text('#!/bin/sh\necho \'["2.13.0", null, "/torch"]\'')
    assert cuda_build(wrapper, environment) is None
