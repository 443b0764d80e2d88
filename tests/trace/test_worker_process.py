"""The process that unpickles a snapshot: its own failure is no accusation of the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.interpreters import ROOTS, copied_build, interpreter
from support.recordings import varying_lengths, write
from support.waiting import until

from torchmem.trace.interpreter import only_needed, without_python_variables

COMMANDS = pytest.mark.parametrize("command", ["why", "whatif"])
# What pickle calls, and the child of a malicious file must not.
MALICIOUS = b"\x80\x04cos\nsystem\n(Vtouch pwned\ntR."
HUGE = b"\x80\x04Nr\xff\xff\xff\xff."
LOADER = "error while loading shared libraries: libpython3.so: cannot open shared object file"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid snapshot."""
    return write(varying_lengths().snapshot(), tmp_path_factory.mktemp("snapshot") / "rank0.pickle")


def torchmem_with(
    python: Path, *words: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run torchmem with an interpreter."""
    return subprocess.run(
        [python, "-m", "torchmem.cli", *words],
        env=os.environ | {"PYTHONPATH": ROOTS} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """Return the sentence on stderr, of a command that exits with code 2."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr.removeprefix("torchmem: ").rstrip("\n")


@COMMANDS
@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "PATH"])
def test_an_interpreter_that_needs_a_variable(
    variable: str, command: str, snapshot: Path, tmp_path: Path
) -> None:
    """The snapshot is read where Python does not start without it."""
    value = f"{tmp_path}:{os.environ.get(variable, '')}"
    check = f'case "${variable}" in {tmp_path}:*) ;; *) echo {variable} >&2; exit 127;; esac'
    python = interpreter(tmp_path, check)
    done = torchmem_with(python, command, snapshot, **{variable: value})
    assert (done.returncode, done.stderr) == (0, "")


@COMMANDS
def test_a_copied_python(command: str, snapshot: Path, tmp_path: Path) -> None:
    """The snapshot is read by a Python that needs PYTHONHOME and LD_LIBRARY_PATH to start."""
    python, variables = copied_build(tmp_path)
    for missing in variables:
        rest = {name: value for name, value in variables.items() if name != missing}
        assert subprocess.run([python, "-c", ""], env=rest, capture_output=True).returncode  # noqa: PLW1510
    done = torchmem_with(python, command, snapshot, **variables)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("last_words", "reason"),
    [
        (f"echo Warning >&2; echo python: {LOADER} >&2; exit 127", f"python: {LOADER}"),
        ("exit 3", "exit code 3"),
        ("kill -KILL $$", "killed by SIGKILL"),
        ("echo Loading modules", "Loading modules"),
        ("head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1", "x" * 200),
        ("printf 'a\\033[31mb' >&2; exit 1", "a\N{REPLACEMENT CHARACTER}[31mb"),
    ],
)
def test_a_process_that_does_not_start(
    last_words: str, reason: str, snapshot: Path, tmp_path: Path
) -> None:
    """One sentence has the last line of its stderr, and nothing is said of the file."""
    # `-S` is how torchmem starts it.
    python = interpreter(tmp_path, f'if [ "$1" = -S ]; then {last_words}; fi')
    assert one_sentence(torchmem_with(python, "whatif", snapshot)) == (
        f"{snapshot} was not read, because the Python process that reads snapshots did not start "
        f"({reason}): check that `{python} -S -c pass` works and prints nothing."
    )


def test_a_machine_without_memory(snapshot: Path, tmp_path: Path) -> None:
    """A limit of the session that is lower than that of the file says nothing about the file."""
    python = interpreter(tmp_path, 'if [ "$1" = -S ]; then ulimit -v 65536; fi')
    path = tmp_path / "rank0.pickle"
    for content in (HUGE, b"\x80\x04" + b"]" * (8 << 20)):
        path.write_bytes(content)
        sentence = one_sentence(torchmem_with(python, "why", path))
        assert sentence.startswith(f"{path} was not read, because this machine or session allows")
    assert torchmem_with(python, "why", snapshot).returncode == 0


def read_while(path: Path, interfere: Callable[[int], object]) -> str:
    """Return what torchmem says of a file when something happens to the process that reads it."""
    command = [sys.executable, "-m", "torchmem.cli", "why", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        child = int(until(children.read_text))
        until(lambda: not Path(f"/proc/{child}/fdinfo/0").read_text().startswith("pos:\t0\n"))
        interfere(child)
        _, errors = parent.communicate(timeout=120)
    assert (parent.returncode, errors.count("\n")) == (2, 1)
    return errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    """A process that is killed while it reads is named as that."""
    path = tmp_path / "long.pickle"
    path.write_bytes(b"\x80\x04" + b"N0" * (32 << 20))  # a second, without memory
    said = read_while(path, lambda child: os.kill(child, number))
    assert f"{number.name}" in said
    assert "was not read" in said
    assert "malicious" not in said


@COMMANDS
def test_a_malicious_file_is_still_told_as_such(command: str, tmp_path: Path) -> None:
    """Code, and more memory than a file of that size needs, are the file's own fault."""
    path = tmp_path / "rank0.pickle"
    path.write_bytes(MALICIOUS)
    said = one_sentence(torchmem_with(Path(sys.executable), command, path))
    assert "refers to code (os.system)" in said
    path.write_bytes(HUGE)
    said = one_sentence(torchmem_with(Path(sys.executable), command, path))
    assert "needs more memory than any snapshot of its size, so it is damaged or malicious" in said


SECRETS = {"AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root", "LD_PRELOAD": "a", "TORCHMEM_TOKEN": "x"}


def test_the_process_gets_no_secret_and_no_other_setting_of_python() -> None:
    """It gets what the loader and Python need to start, and nothing else."""
    base: Mapping[str, str] = {
        **SECRETS,
        "LD_LIBRARY_PATH": "/lib",
        "PYTHONHOME": "/home",
        "PYTHONPATH": "/x",
        "PYTHONINSPECT": "1",
        "PATH": "/bin",
    }
    needed = {"LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/home", "PATH": "/bin"}
    assert only_needed(base) == needed
    assert without_python_variables(base) == SECRETS | needed


def test_a_file_in_the_current_folder_is_no_module(snapshot: Path, tmp_path: Path) -> None:
    """A pickle.py beside the job is not imported by the process."""
    for name in ("pickle", "json", "torchmem"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    code = "from torchmem.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path[:0] = {ROOTS.split(os.pathsep)!r}; {code}",
            *("why", str(snapshot)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


REPLAY = """
from pathlib import Path
from torchmem.run.replay import Question, replay
print(replay(Path(sys.argv[1]), Question(0, {}, ["expandable_segments:True"])).problem)
"""
ASK = """
import asyncio
from torchmem.mcp.worker import Source, ask
arguments = {"file": sys.argv[1], "at": None, "gpu": None, "rows": 1, "only_leaks": False}
reply = asyncio.run(ask(Source("/"), "read_snapshot", arguments))
print(reply.text if reply.is_error else "answered")
"""


def printed(python: Path, code: str, path: Path, **environment: str) -> str:
    """Return the last line that code prints."""
    done = subprocess.run(
        [python, "-c", f"import sys\n{code}", path],
        env=os.environ | {"PYTHONPATH": ROOTS} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (REPLAY, f"the process that replays it failed (python: {LOADER})."),
        (ASK, "this has failed because of an error in torchmem, which stderr of `torchmem mcp`"),
    ],
    ids=["replay", "mcp"],
)
def test_other_processes_that_do_not_start(
    code: str, sentence: str, snapshot: Path, tmp_path: Path
) -> None:
    """The replay for `torchmem run --apply-advice` and the tools of `torchmem mcp` say so."""
    last_words = f"echo python: {LOADER} >&2; exit 127"
    python = interpreter(tmp_path, f'if [ "$1" = -S ]; then {last_words}; fi')
    assert printed(python, code, snapshot).startswith(sentence)


def test_a_tool_of_mcp_that_is_killed(snapshot: Path, tmp_path: Path) -> None:
    """A process that Linux has killed did not take too long."""
    python = interpreter(tmp_path, 'if [ "$1" = -S ]; then kill -KILL $$; fi')
    assert "was killed by SIGKILL" in printed(python, ASK, snapshot)


def test_other_processes_of_a_copied_python(snapshot: Path, tmp_path: Path) -> None:
    """They start with PYTHONHOME and LD_LIBRARY_PATH too."""
    python, variables = copied_build(tmp_path)
    assert printed(python, REPLAY, snapshot, **variables) == "it has no OutOfMemoryError."
    variables["PYTHONPATH"] = os.pathsep.join([ROOTS, sysconfig.get_path("purelib")])
    assert printed(python, ASK, snapshot, **variables) == "answered"
