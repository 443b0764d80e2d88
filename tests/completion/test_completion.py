"""`torchmem manifests completion`: real shells complete `torchmem` on a real terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.needs import skip_without

from torchmem.manifests.completion import SHELLS, script

TIMEOUT_SECONDS = 60.0
# What prints the words that the shell would pass to torchmem, between marks that no one types.
SHOW = {
    "bash": "torchmem() { printf '<%s' \"$@\"; echo '>'; }",
    "zsh": "torchmem() { printf '<%s' \"$@\"; echo '>'; }",
    "fish": "function torchmem; printf '<%s' $argv; echo '>'; end",
}
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SETUP = {
    "bash": "source {script}",
    "zsh": "fpath=($PWD $fpath); autoload -U compinit; compinit -D -u",
    "fish": "source {script}",
}
CASES = [
    ("torchmem doct", "doctor"),
    ("torchmem doctor --js", "--json"),
    ("torchmem why --at pe", "peak"),
    ("torchmem whatif --gpu-model h100-n", "h100-nvl-94gb"),
    ("torchmem demo --scenario retry", "retry-storm"),
    ("torchmem why rep", "report-of-rank3.json"),
    ("torchmem manifests rules --out rul", "rules-of-mine"),
    ("torchmem manifests kube", "kubernetes"),
    ("torchmem manifests dashboards --datas", "--datasource"),
    ("torchmem run -- torchmem-trai", "torchmem-trainer"),
    ("torchmem run -- python trai", "train-it.py"),
    ("torchmem run --name x -- python trai", "train-it.py"),
    ("torchmem preflight --gpu-model h200-141gb -- python trai", "train-it.py"),
    ("torchmem manifests completion fi", "fish"),
]


class Terminal:
    """A shell on a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, text: str) -> None:
        """Type characters."""
        os.write(self._descriptor, text.encode())

    def read_until(self, mark: str) -> str:
        """Return what was printed up to `mark`, and go on behind it."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while mark not in self._seen:
            assert time.monotonic() < deadline, f"no {mark!r} in {self._seen!r}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self._seen += os.read(self._descriptor, 1 << 16).decode(errors="replace")
        before, _, self._seen = self._seen.partition(mark)
        return before


@contextmanager
def terminal(shell: str, folder: Path) -> Iterator[Terminal]:
    """Run a shell in `folder`, with completion and a `torchmem` that shows its words."""
    controller, terminal = pty.openpty()
    environment = {
        "HOME": str(folder),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }
    command = ["setsid", "--ctty", *START[shell]]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = Terminal(controller)
        setup = SETUP[shell].format(script=script(shell))
        try:
            shown.type(f"{SHOW[shell]}; {setup}; torchmem ready\n")
            shown.read_until("<ready>")
            yield shown
        finally:
            process.kill()
            os.close(controller)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a home with files and folders to complete, and a program."""
    (tmp_path / "report-of-rank3.json").touch()
    (tmp_path / "train-it.py").touch()
    (tmp_path / "rules-of-mine").mkdir()
    shutil.copy(script("zsh"), tmp_path / "_torchmem")
    program = tmp_path / "bin" / "torchmem-trainer"
    program.parent.mkdir()
    program.touch(mode=0o755)
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_completes_commands_flags_values_and_files(shell: str, folder: Path) -> None:
    """Tab completes each kind of word; after --, programs and the files of the command."""
    skip_without(shell)
    with terminal(shell, folder) as shown:
        for line, completed in CASES:
            shown.type(f"{line}\t\n")
            shown.read_until("<")
            words = shown.read_until(">")
            expected = "<".join([*line.split()[1:-1], completed])
            assert words.strip().rstrip("/") == expected, f"{shell}: {line}"
