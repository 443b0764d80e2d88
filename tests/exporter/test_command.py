"""The exporter as a process: its output, its mistakes in one sentence, and its quick end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.exposition import Exposition
from support.publishing import own_process, own_sample, publish

from torchmem.core.errors import UsageError
from torchmem.exporter import config

ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - what `:PORT` asks for
EXPORTER = [sys.executable, "-m", "torchmem.exporter"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the exporter to its end."""
    return subprocess.run([*EXPORTER, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_once_prints_one_exposition(run_dir: Path) -> None:
    """`--once` prints what a scrape would give, on a machine without a driver too, and ends with 0."""
    publish(run_dir, own_sample())
    ended = run("--once", "--run-dir", str(run_dir))
    shown = Exposition.of_text(ended.stdout)

    assert 0 == ended.returncode
    assert 1.0 == shown.value("torchmem_process_state", state="running")
    assert 1 == len(shown.matching("nvml_up"))
    assert "Traceback" not in ended.stderr


HUNG = """
import sys, time
from pathlib import Path
from torchmem.exporter import main
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import Settings
from torchmem.exporter.rundir import RunDirectory
from torchmem.exporter.testing import FakeNvml

def hang():
    print("asked", file=sys.stderr, flush=True)
    time.sleep(600)

exporter = Exporter(FakeNvml(hang), RunDirectory(Path("none")), deadline_seconds=300)
main.serve_until_signal(exporter, Settings(listen="127.0.0.1:0"))
"""


def test_hung_driver_does_not_hold_up_the_end() -> None:
    """SIGTERM ends the exporter while a driver call never returns and a scrape waits for it."""
    with subprocess.Popen([sys.executable, "-c", HUNG], stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        next(line for line in popen.stderr if "asked" in line)
        popen.send_signal(signal.SIGTERM)
        rest = popen.communicate(timeout=60)[1]

    assert (0, False) == (popen.returncode, "Traceback" in rest)


def test_reader_that_closes_early_is_no_error(run_dir: Path) -> None:
    """`torchmem exporter --once | head` ends without a traceback."""
    for rank in range(40):
        publish(run_dir, own_sample(process=own_process(rank=rank)), f"{rank}.sample.json")
    command = [*EXPORTER, "--once", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.readline()
        popen.stdout.close()
        complaint = popen.stderr.read()

    assert (0, False) == (popen.returncode, "Error" in complaint)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_cleanly(run_dir: Path, number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C end the exporter with 0 and without a traceback."""
    command = [*EXPORTER, "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        first = next(line for line in popen.stderr if "serving" in line)
        popen.send_signal(number)
        rest = popen.communicate(timeout=60)[1]

    assert re.search(r"serving http://127\.0\.0\.1:\d+/metrics", first)
    assert (0, False) == (popen.returncode, "Traceback" in rest)


def test_taken_port_is_one_sentence_and_code_2(run_dir: Path) -> None:
    """The second exporter on a port says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ended = run("--listen", address, "--run-dir", str(run_dir))

    assert 2 == ended.returncode
    assert ended.stderr.startswith(f"torchmem: Cannot listen on {address}")
    assert 1 == ended.stderr.count("\n")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("lisen: x", "Unknown key 'lisen' in {file}: did you mean 'listen'?"),
        ("colour: red", "Unknown key 'colour' in {file}: known keys are listen, run_dir"),
        ("3: x", "Unknown key 3 in {file}"),
        ("listen: 9847", "listen in {file} is 9847: give text"),
        ("ttl_seconds: soon", "ttl_seconds in {file} is 'soon': give a positive number"),
        ("ttl_seconds: -1", "ttl_seconds in {file} is -1: give a positive number"),
        ("ttl_seconds: .nan", "ttl_seconds in {file} is nan: give a positive number"),
        ("- listen", "{file} must hold `key: value` lines"),
        ("a: [", "{file} is not valid YAML at line 1"),
    ],
)
def test_mistake_in_the_configuration_file_is_named(tmp_path: Path, content: str, expected: str) -> None:
    """A wrong configuration says which key, where, and what was probably meant."""
    file = tmp_path / "exporter.yml"
    file.write_text(content)

    with pytest.raises(UsageError, match=re.escape(expected.format(file=file))):
        config.load(file, {})


def test_missing_configuration_file_is_named(tmp_path: Path) -> None:
    """The path is in the sentence."""
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none.yml"))):
        config.load(tmp_path / "none.yml", {})


def test_flag_wins_over_file_over_default(tmp_path: Path) -> None:
    """Settings come from the nearest place that gives them."""
    file = tmp_path / "exporter.yml"
    file.write_text("listen: 0.0.0.0:1\nttl_seconds: 5\n")

    settings = config.load(file, {"listen": ":9", "run_dir": None})

    assert ((ALL_INTERFACES, 9), 5, 5.0) == (settings.address, settings.ttl_seconds, settings.scrape_deadline_seconds)


@pytest.mark.parametrize("listen", ["", "localhost", "host:", "host:http", "host:99999"])
def test_wrong_address_is_named(listen: str) -> None:
    """An address that cannot be meant shows a right one."""
    with pytest.raises(UsageError, match=r"HOST:PORT"):
        _ = config.load(None, {"listen": listen}).address


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("[::1]:9847", ("::1", 9847)), ("localhost:0", ("localhost", 0)), (":1", (ALL_INTERFACES, 1))],
)
def test_address_forms(listen: str, expected: tuple[str, int]) -> None:
    """IPv6 in brackets, names, and all interfaces."""
    assert expected == config.load(None, {"listen": listen}).address
