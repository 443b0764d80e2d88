"""`torchmem top` as a process, on a real terminal and without one."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fcntl import ioctl
from pathlib import Path
from struct import pack

import pytest
from support.publishing import own_sample, publish
from support.samples import UUID

from torchmem.cli.main import main
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.subjects.memory import MemoryInfo

GIB = 1 << 30
TIMEOUT_SECONDS = 60.0
COMMAND = [sys.executable, "-m", "torchmem.cli", "top"]
LEAVE_SCREEN, SHOW_CURSOR = "\x1b[?1049l", "\x1b[?25h"


@contextmanager
def exporter(run_dir: Path, port: int = 0) -> Iterator[ExporterServer]:
    """Serve one GPU with one rank."""
    publish(run_dir, own_sample())
    gpu = FakeGpu(GpuIdentity(0, UUID), MemoryInfo(80 * GIB, 70 * GIB, 9 * GIB, GIB))
    collector = Exporter(FakeNvml.of(gpu), RunDirectory(run_dir))
    with closing(collector), closing(serve(collector, "127.0.0.1", port)) as server:
        yield server


class Terminal:
    """A pseudo-terminal of 80×24 with `torchmem top` on it."""

    def __init__(self, url: str, errors: int | None = None) -> None:
        self.ours, self.theirs = pty.openpty()
        ioctl(self.theirs, termios.TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(self.theirs)
        self.seen = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *COMMAND, "--interval", "0.2", url],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs if errors is None else errors,
            env=os.environ | {"TERM": "xterm-256color"},
        )

    def type(self, text: str) -> None:
        """Type characters."""
        os.write(self.ours, text.encode())

    def read_until(self, mark: str) -> None:
        """Wait until `mark` was printed."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while mark not in self.seen:
            assert time.monotonic() < deadline, f"no {mark!r} in {self.seen!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        """End what still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize("end", ["q", "\x03", signal.SIGTERM], ids=["q", "Ctrl-C", "SIGTERM"])
def test_the_end_puts_the_terminal_back(tmp_path: Path, end: str | signal.Signals) -> None:
    """After q, Ctrl-C and SIGTERM the modes, the screen and the cursor are those of before."""
    with exporter(tmp_path / "run") as server, closing(Terminal(server.url)) as terminal:
        terminal.read_until("night")
        during = termios.tcgetattr(terminal.theirs)
        if isinstance(end, str):
            terminal.type(end)
        else:
            terminal.process.send_signal(end)
        terminal.read_until(LEAVE_SCREEN)
        terminal.read_until(SHOW_CURSOR)

        assert terminal.process.wait(TIMEOUT_SECONDS) == 0
        assert during != terminal.modes
        assert termios.tcgetattr(terminal.theirs) == terminal.modes
        assert "Traceback" not in terminal.seen


def test_it_ends_with_its_terminal(tmp_path: Path) -> None:
    """When the ssh connection is cut, it ends without a traceback."""
    with (tmp_path / "errors").open("wb") as errors:
        terminal = Terminal("127.0.0.1:1", errors.fileno())
    terminal.read_until("does not respond")
    os.close(terminal.theirs)
    os.close(terminal.ours)
    terminal.process.wait(TIMEOUT_SECONDS)

    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_it_waits_for_the_exporter(tmp_path: Path) -> None:
    """Without an exporter a line says so; when one starts, its ranks appear."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with closing(Terminal(f"127.0.0.1:{port}")) as terminal:
        terminal.read_until("does not respond")
        with exporter(tmp_path / "run", port):
            terminal.read_until("night")
        terminal.type("\x1b[Bjzq")
        assert terminal.process.wait(TIMEOUT_SECONDS) == 0


def test_without_a_terminal_it_prints_once(tmp_path: Path) -> None:
    """In a pipe it prints one screen of plain text, and ends."""
    with exporter(tmp_path / "run") as server:
        done = subprocess.run(
            [*COMMAND, server.url], capture_output=True, text=True, timeout=60, check=False
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "GPU 0" in done.stdout
    assert "night" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--once", "127.0.0.1:1"], 1, "does not respond: Connection refused. Start it:"),
        (["ftp://node17"], 2, "write http://HOST:9847"),
        (["http://u:secret@node17:port"], 2, "http://node17:port is not the URL of an exporter"),
        (["--interval", "0"], 2, "--interval must be between 0.2 and 3600 seconds, not 0."),
        (["--interval", "nan"], 2, "--interval must be between"),
    ],
    ids=["away", "scheme", "port", "interval", "nan"],
)
def test_errors(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot work is one sentence that says what to do, without the password."""
    assert code == main(["top", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert "secret" not in line
