"""`torchmem run`: the command is itself, and only processes that use CUDA are touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.run.launch import STARTUP

TORCHMEM = [sys.executable, "-m", "torchmem.cli"]
SHOW = "import sys; print(sorted(m for m in sys.modules if m.startswith('torchmem')))"


def torchmem_run(
    *command: str, flags: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command under `torchmem run`."""
    return subprocess.run(
        [*TORCHMEM, "run", *flags, "--", *command],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def python(code: str, *folders: Path, flags: tuple[str, ...] = ()) -> str:
    """Return what Python code prints under `torchmem run`; nothing is on stderr."""
    path = os.pathsep.join(map(str, folders))
    done = torchmem_run(sys.executable, *flags, "-W", "error", "-c", code, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands(code: int) -> None:
    """The command's exit code is returned."""
    assert code == torchmem_run(sys.executable, "-c", f"raise SystemExit({code})").returncode


def test_the_command_is_the_same_process() -> None:
    """The command has the process id that a launcher knows, so that its signals arrive."""
    show = [*TORCHMEM, "run", "--", sys.executable, "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(show, stdout=subprocess.PIPE, text=True) as popen:
        out, _ = popen.communicate(timeout=120)
    assert popen.pid == int(out)


def test_a_signal_ends_the_command() -> None:
    """A command that is killed by a signal reports that signal."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert torchmem_run(sys.executable, "-c", code).returncode == -signal.SIGTERM


def test_a_broken_pipe_ends_a_command_as_without_torchmem() -> None:
    """SIGPIPE, which Python ignores, has its default action in the command."""
    done = torchmem_run("sh", "-c", "yes | head -n 1; kill -PIPE $$; echo survived")
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, "y\n")


def test_stdin_stdout_and_stderr_pass_through() -> None:
    """The command reads the caller's stdin and writes to the caller's streams."""
    done = subprocess.run(
        [*TORCHMEM, "run", "sh", "-c", "cat; echo error >&2"],
        input="line\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("line\n", "error\n")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("no-such-command",), 127, "no-such-command is not a program: check its name"),
        (("train.py",), 127, "train.py is not a program: start it with Python, as in -- python"),
        ((), 2, "no command"),
        (("/",), 127, "/ is not a program: check its name"),
    ],
)
def test_a_command_that_cannot_start_is_one_line(
    command: tuple[str, ...], code: int, words: str
) -> None:
    """The exit code is the shell's, with one sentence."""
    done = torchmem_run(*command)
    assert (code, 1) == (done.returncode, done.stderr.count("\n"))
    assert words in done.stderr


def test_a_file_that_is_no_program_is_one_line(tmp_path: Path) -> None:
    """A file of an unknown format gives exit code 126 and one sentence."""
    (tmp_path / "file").write_bytes(b"\x00")
    (tmp_path / "file").chmod(0o755)
    done = torchmem_run(str(tmp_path / "file"))
    assert (done.returncode, done.stderr.count("\n")) == (126, 1)


def test_a_process_without_torch_loads_only_the_hook() -> None:
    """Helper processes import next to nothing, and never torch."""
    run = ["torchmem.run", "torchmem.run.autostart"]
    modules = ["torchmem", *run, "torchmem.startup", "torchmem.startup.torch_import"]
    assert python(SHOW) == f"{modules}\n"
    assert python("import sys; print('torch' in sys.modules)") == "False\n"


def test_a_module_named_torch_that_is_not_pytorch_is_left_alone(tmp_path: Path) -> None:
    """The module keeps its loader, and the SDK is not loaded."""
    (tmp_path / "torch.py").write_text("VALUE = 3\n")
    code = """
import sys, torch
print('torchmem.sdk' in sys.modules, torch.VALUE)
print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)
"""
    assert python(code, tmp_path) == "False 3\nSourceFileLoader SourceFileLoader\n"


@pytest.mark.parametrize("content", ["raise RuntimeError('broken')", "", "import nothing_of_this"])
def test_an_import_of_torch_fails_as_without_torchmem(tmp_path: Path, content: str) -> None:
    """A torch that is broken or not PyTorch raises its own error, or none."""
    (tmp_path / "torch.py").write_text(content)
    code = "\ntry:\n    import torch\nexcept Exception as error:\n    print(repr(error))"
    plain = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    done = torchmem_run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path))
    assert (0, plain.stdout) == (done.returncode, done.stdout)
    assert done.stderr.count("\n") <= 1


def test_without_torch_the_error_is_pythons_own() -> None:
    """Where torch is not installed, the program sees ModuleNotFoundError."""
    code = """
import sys
sys.path[:] = [p for p in sys.path if 'site-packages' not in p]
try:
    import torch
except ModuleNotFoundError as error:
    print(error, error.name)
"""
    assert python(code) == "No module named 'torch' torch\n"


def test_the_environments_own_sitecustomize_runs(tmp_path: Path) -> None:
    """A sitecustomize.py of the user runs once, and is the module that `import` returns."""
    own = "import os; os.environ['OWN'] = os.environ.get('OWN', '') + 'x'; VALUE = 7\n"
    (tmp_path / "sitecustomize.py").write_text(own)
    code = "import os, sitecustomize; print(os.environ['OWN'], sitecustomize.VALUE)"
    # It runs in the process of `torchmem run` too, as in every Python process.
    assert python(code, tmp_path) == "xx 7\n"


def test_the_path_of_imports_is_unchanged(tmp_path: Path) -> None:
    """sys.path is that of the program without torchmem; PYTHONPATH keeps the user's folders."""
    code = "import sys; print(sys.path)"
    plain = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert plain.stdout == python(code, tmp_path)
    assert (
        python("import os; print(os.environ['PYTHONPATH'])", tmp_path)
        == f"{STARTUP}{os.pathsep}{tmp_path}\n"
    )


def test_a_python_without_site_is_left_alone() -> None:
    """Python that does not import site runs as without torchmem."""
    assert python(SHOW, flags=("-S",)) == "[]\n"


def test_flags_become_settings() -> None:
    """--name and --run-dir are the settings run and run_dir of every process."""
    show = "import os; print(os.environ['TORCHMEM_RUN'], os.environ['TORCHMEM_RUN_DIR'])"
    done = torchmem_run(
        sys.executable, "-c", show, flags=("--name", "nightly", "--run-dir", "/run/x")
    )
    assert done.stdout == "nightly /run/x\n"


def test_zero_turns_it_off() -> None:
    """TORCHMEM=0 in a part of the job leaves that part alone."""
    done = torchmem_run("env", "TORCHMEM=0", sys.executable, "-c", SHOW)
    assert "torchmem.startup.torch_import" in done.stdout
    code = "import sys; print([f for f in sys.meta_path if 'torch_import' in type(f).__module__])"
    assert torchmem_run("env", "TORCHMEM=0", sys.executable, "-c", code).stdout == "[]\n"
