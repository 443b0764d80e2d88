"""Programs that start the Python of a phantom run: shells, launchers, and others."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.needs import skip_without

VERSION = "__version__ = '2.13.0+cu130'\ncuda = '13.0'\n"
TORCH = """
import ctypes, pathlib
calls = ctypes.CDLL(str(pathlib.Path(__file__).parent / "lib" / "libtorch_cuda.so"))
"""
LACKING = "int cudnnDreamOfElectricSheep(void);\n"
CALLS = f"{LACKING}int lacking(void) {{ return cudnnDreamOfElectricSheep(); }}\n"
SCRIPT = "import sys, torch; print(torch.calls.lacking(), sys.argv[1:])"
OTHER_PYTHON = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
ARGUMENTS = ["--name", "two words"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment without torchmem, with a PyTorch of one call."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    library = packages / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    (packages / "torch" / "version.py").write_text(VERSION)
    (packages / "torch" / "__init__.py").write_text(TORCH)
    (folder / "calls.c").write_text(CALLS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "calls.c"], check=True)
    script = folder / "train.py"
    script.write_text(f"#!{folder}/bin/python\n{SCRIPT}")
    script.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "wrapper",
    [
        "{program}",
        "env NAME=value {program}",
        "sh -c {quoted}",
        "bash -c {quoted}",
        "sh -c {nested}",
        "bash -c 'time \"$@\"' - {program}",
        "nice {program}",
        "timeout 60 {program}",
        "setsid --wait {program}",
        "stdbuf --output=L {program}",
        "script --quiet --return --command {quoted} /dev/null",
        f"{Path(sys.executable).resolve()} -c {shlex.quote(OTHER_PYTHON)} {{program}}",
    ],
)
def test_a_wrapped_program_has_its_stubs(
    cache: dict[str, str], tmp_path: Path, environment: Path, wrapper: str
) -> None:
    """However a Python is started, it has the library for its own PyTorch, and its arguments."""
    words = shlex.join([str(environment / "bin" / "python"), str(environment / "train.py")])
    program = f"{words} {shlex.join(ARGUMENTS)}"
    quoted = shlex.quote(program)
    nested = shlex.quote(f"sh -c {quoted}")
    command = shlex.split(wrapper.format(program=program, quoted=quoted, nested=nested))
    skip_without(command[0])

    done = on_phantom(cache, tmp_path, command)

    assert done.stdout.splitlines()[-1:] == [f"3000 {ARGUMENTS}"], done.stderr


def test_a_script_finds_its_python(
    cache: dict[str, str], tmp_path: Path, environment: Path
) -> None:
    """The interpreter in the first line of a script counts, also behind a shell."""
    command = ["sh", "-c", shlex.join([str(environment / "train.py"), *ARGUMENTS])]

    assert on_phantom(cache, tmp_path, command).stdout.splitlines() == [f"3000 {ARGUMENTS}"]


def test_a_build_for_the_cpu_is_left_alone(cache: dict[str, str], tmp_path: Path) -> None:
    """A Python whose PyTorch has no CUDA runs as it does elsewhere."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    code = f"export PYTHONPATH={tmp_path}/site:$PYTHONPATH; {sys.executable} -c 'print(7)'"

    assert on_phantom(cache, tmp_path, ["sh", "-c", code]).stdout == "7\n"


def on_phantom(
    cache: dict[str, str], tmp_path: Path, command: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run a command on a phantom GPU, with a `python` on PATH that has no PyTorch."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    variables = {**cache, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{cache['PATH']}"}
    phantom = [sys.executable, "-m", "torchmem.phantom", "--state", str(tmp_path / "state"), "--"]
    return subprocess.run(
        [*phantom, *command],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
