"""`torchmem top` as a process, on a real terminal and without one."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from fcntl import ioctl
from pathlib import Path
from struct import pack

import pytest
from rich.console import Console
from support.publishing import own_sample, publish
from support.samples import UUID
from support.stack import free_port

from torchmem.cli.exporter import AwayError, SilentError, ask
from torchmem.cli.http import HttpAnswer, exporter_url
from torchmem.cli.main import main
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.top.screen import Screen, page
from torchmem.top.source import ScreenSource

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

    def __init__(
        self, url: str, errors: int | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(80, 24)
        self.modes = termios.tcgetattr(self.theirs)
        self.seen = ""
        self.decoder = getincrementaldecoder("utf-8")(errors="replace")
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *COMMAND, "--interval", "0.2", "--exporter", url],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs if errors is None else errors,
            env=os.environ | {"TERM": "xterm-256color", **(environment or {})},
        )

    def resize(self, width: int, height: int) -> None:
        """Change the size."""
        ioctl(self.theirs, termios.TIOCSWINSZ, pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        """Type characters."""
        os.write(self.ours, text.encode())

    def read_until(self, mark: str) -> None:
        """Wait until `mark` was printed."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while mark not in self.seen:
            assert time.monotonic() < deadline, f"no {mark!r} in {self.seen!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += self.decoder.decode(os.read(self.ours, 1 << 16))

    def read_anew_until(self, mark: str) -> None:
        """Wait until `mark` was printed again."""
        self.seen = ""
        self.read_until(mark)

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


def test_the_report_and_the_help(tmp_path: Path) -> None:
    """Enter opens the report of a rank and F1 the help; Escape goes back from each to the list."""
    with exporter(tmp_path / "run") as server, closing(Terminal(server.url)) as terminal:
        terminal.read_until("night")
        terminal.type("\r")
        terminal.read_anew_until("Memory of the GPU")
        terminal.type("\x1bOP")
        terminal.read_anew_until("What to look at first")
        terminal.type("\x1b")
        terminal.read_anew_until("Memory of the GPU")
        terminal.type("\x1b")
        terminal.read_anew_until("Enter report")
        terminal.type("q")

        assert terminal.process.wait(TIMEOUT_SECONDS) == 0


def test_another_size(tmp_path: Path) -> None:
    """When the window gets larger, the screen does, also if a shell exports the first size."""
    shell = {"COLUMNS": "80", "LINES": "24"}
    with (
        exporter(tmp_path / "run") as server,
        closing(Terminal(server.url, environment=shell)) as terminal,
    ):
        terminal.read_until("night")
        terminal.resize(150, 40)
        terminal.read_until(150 * "─")
        terminal.type("q")

        assert terminal.process.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1"}, {"TERM": "xterm"}, {"TERM": "linux"}, {"TERM": "vt100"}],
    ids=["NO_COLOR", "xterm", "linux", "vt100"],
)
def test_without_256_colors_parts_have_letters(tmp_path: Path, environment: dict[str, str]) -> None:
    """Where 16 colors or none could not tell the parts apart, each part is a letter."""
    with (
        exporter(tmp_path / "run") as server,
        closing(Terminal(server.url, environment=environment)) as terminal,
    ):
        terminal.read_until("OOOO")
        terminal.type("q")
        terminal.read_until(LEAVE_SCREEN)

        assert terminal.process.wait(TIMEOUT_SECONDS) == 0
        assert "█" not in terminal.seen
        assert terminal.seen.isascii() is (environment.get("TERM") == "linux")


def test_a_terminal_without_a_cursor(tmp_path: Path) -> None:
    """With TERM=dumb it prints one screen of plain text, and ends."""
    with (
        exporter(tmp_path / "run") as server,
        closing(Terminal(server.url, environment={"TERM": "dumb"})) as terminal,
    ):
        terminal.read_until("Sizes were read")

        assert terminal.process.wait(TIMEOUT_SECONDS) == 0
        assert "\x1b" not in terminal.seen
        assert "night" in terminal.seen


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
    port = free_port()
    with closing(Terminal(f"127.0.0.1:{port}")) as terminal:
        terminal.read_until("does not respond")
        with exporter(tmp_path / "run", port):
            terminal.read_until("night")
        terminal.type("\x1b[Bjzq")
        assert terminal.process.wait(TIMEOUT_SECONDS) == 0


def test_the_run_directory_until_an_exporter_runs(tmp_path: Path) -> None:
    """Without an exporter, the user's ranks are there, explained, under a line that says so."""
    publish(tmp_path / "run", own_sample())
    url = f"http://127.0.0.1:{free_port()}"
    source = ScreenSource(url, tmp_path / "run")
    alone = source.node()
    ((gpu,), (rank,)) = alone.gpus, alone.gpus[0].ranks
    why = source.why((gpu.uuid, rank.id))
    text = page(Screen(alone, url), Console(width=200)).plain
    with exporter(tmp_path / "run", int(url.rpartition(":")[2])):
        served = source.node()

    assert alone.missing is not None
    assert alone.missing.startswith(f"No exporter at {url}: these are ")
    assert text.splitlines()[1] == alone.missing
    assert "NVML" not in text
    assert (rank.run, gpu.temperature_celsius, gpu.index) == ("night", None, None)
    assert why is not None
    assert why.heading[0].startswith("run night")
    assert (served.missing, served.gpus[0].index) == (None, 0)


@pytest.mark.parametrize("ranks", [0, 1])
def test_the_address_of_an_exporter_that_is_away(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who names an exporter sees no other ranks, and a run directory without ranks is no node."""
    if ranks:
        publish(tmp_path, own_sample())
    monkeypatch.setenv("TORCHMEM_RUN_DIR", str(tmp_path))
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SilentError, match="does not respond"):
        ScreenSource(url, None if ranks else tmp_path).node()

    assert main(["top", "--once", "--exporter", url]) == 1
    assert capsys.readouterr().err.startswith(f"torchmem: {url} does not respond: ")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_without_a_terminal_it_prints_once(tmp_path: Path, encoding: str) -> None:
    """In a pipe of any encoding it prints one screen of plain text, and ends."""
    with exporter(tmp_path / "run") as server:
        done = subprocess.run(
            [*COMMAND, "--exporter", server.url],
            capture_output=True,
            encoding=encoding,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "GPU 0" in done.stdout
    assert "night" in done.stdout


def test_a_pipe_that_is_closed(tmp_path: Path) -> None:
    """`torchmem top | true` ends without a traceback."""
    with (
        exporter(tmp_path / "run") as server,
        subprocess.Popen(
            [*COMMAND, "--exporter", server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()

    assert "Traceback" not in errors


def test_the_address_of_prometheus() -> None:
    """Where Prometheus answers, the error says so and what to pass."""

    def get(url: str) -> HttpAnswer:
        if url.endswith("/api/v1/status/buildinfo"):
            return HttpAnswer(200, None, b'{"status":"success","data":{"version":"3.5.0"}}')
        return HttpAnswer(404, None, b"404 page not found")

    with pytest.raises(AwayError, match="is Prometheus: pass the address of an exporter"):
        ask("http://127.0.0.1:9090", get)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ["--once", "--exporter", "127.0.0.1:1"],
            1,
            "Connection refused. Start it:",
        ),
        (["--exporter", "ftp://node17"], 2, "write http://HOST:9847"),
        (
            ["--exporter", "http://u:secret@node17:port"],
            2,
            "http://node17:port is not the URL of",
        ),
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


@pytest.mark.parametrize("given", ["node17:9847", "http://node17:9847/", "node17:9847/metrics"])
def test_addresses(given: str) -> None:
    """The scheme may be left out, and the address of the metrics works too."""
    assert exporter_url(given) == "http://node17:9847"
