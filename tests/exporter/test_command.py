"""The exporter as a process: its output, its settings and their errors, and how it stops."""

from __future__ import annotations

import argparse
import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import bcrypt
import pytest
from support.exposition import Exposition
from support.publishing import own_process, own_sample, publish
from support.raw_http import ask, connect, status

from torchmem.commands import exporter as command
from torchmem.exporter import config, main
from torchmem.exporter.config import ALL_INTERFACES, ExporterSettings
from torchmem.sample.errors import UsageError

EXPORTER = [sys.executable, "-m", "torchmem.cli", "exporter"]
GET_HEALTHY = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the exporter until it exits."""
    return subprocess.run(
        [*EXPORTER, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_once_prints_the_metrics(run_dir: Path) -> None:
    """`--once` prints the metrics of one scrape and exits with 0, even without a driver."""
    publish(run_dir, own_sample())
    ended = run("--once", "--run-dir", str(run_dir))
    metrics = Exposition.of_text(ended.stdout)

    assert ended.returncode == 0
    assert metrics.value("torchmem_process_state", state="running") == 1.0
    assert len(metrics.matching("nvml_up")) == 1
    assert "Traceback" not in ended.stderr


HUNG = """
import sys, time
from pathlib import Path
from torchmem.exporter import main
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import ALL_INTERFACES, ExporterSettings
from torchmem.exporter.sample_files import RunDirectory
from torchmem.demo.simulated_nvml import FakeNvml

def hang():
    print("asked", file=sys.stderr, flush=True)
    time.sleep(600)

exporter = Exporter(FakeNvml(hang), RunDirectory(Path("none")), deadline_seconds=300)
main.serve_until_signal(exporter, ExporterSettings(listen="127.0.0.1:0"))
"""


def test_hung_driver_does_not_delay_the_exit() -> None:
    """SIGTERM stops the exporter while a scrape waits for a driver call that never returns."""
    with subprocess.Popen([sys.executable, "-c", HUNG], stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        next(line for line in popen.stderr if "asked" in line)
        popen.send_signal(signal.SIGTERM)
        rest = popen.communicate(timeout=60)[1]

    assert (popen.returncode, "Traceback" in rest) == (0, False)


def test_reader_that_closes_early_is_no_error(run_dir: Path) -> None:
    """`torchmem exporter --once | head` exits without a traceback."""
    for rank in range(40):
        publish(run_dir, own_sample(process=own_process(rank=rank)), f"{rank}.sample.json")
    command = [*EXPORTER, "--once", "--run-dir", str(run_dir)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.readline()
        popen.stdout.close()
        complaint = popen.stderr.read()

    assert (popen.returncode, "Error" in complaint) == (0, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_it_cleanly(run_dir: Path, number: signal.Signals) -> None:
    """The exporter exits with 0 and without a traceback on SIGTERM and Ctrl-C."""
    command = [*EXPORTER, "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        first = next(line for line in popen.stderr if "serving" in line)
        popen.send_signal(number)
        rest = popen.communicate(timeout=60)[1]

    assert re.search(r"serving http://127\.0\.0\.1:\d+/metrics", first)
    assert popen.returncode == 0, rest
    assert "Traceback" not in rest


def test_hangup_reloads_the_configuration(run_dir: Path, tmp_path: Path) -> None:
    """SIGHUP applies the settings that can change, keeps valid ones, and does not end it."""
    config_file, web_file = tmp_path / "exporter.yml", tmp_path / "web.yml"
    config_file.write_text("pcie_throughput: false\n")
    web_file.write_text("{}")
    command = [*EXPORTER, "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    command += ["--config", str(config_file), "--web.config.file", str(web_file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        log = popen.stderr
        served = re.search(r"http://\S+", next(line for line in log if "serving" in line))
        assert served is not None

        def has_pcie() -> bool:
            """Return whether PCIe throughput is collected."""
            with urllib.request.urlopen(served[0], timeout=60) as answer:  # noqa: S310 - loopback
                return b'collector="pcie_throughput"' in answer.read()

        def reloaded(content: str) -> tuple[str, bool]:
            """Return the new lines of the log, and whether PCIe throughput is collected."""
            config_file.write_text(content)
            popen.send_signal(signal.SIGHUP)
            lines = ""
            while "the configuration" not in lines:
                lines += next(log)
            return lines, has_pcie()

        before = has_pcie()  # after it, no scrape joins the collection of the exporter's start
        on = reloaded("pcie_throughput: true\n")
        invalid = reloaded("pcie_throughput: maybe\n")
        off = reloaded("ttl_seconds: 1\n")
        restart = next(log)
        web_file.write_text("rate_limit: soon")
        web = reloaded("{}")
        popen.terminate()
        rest = popen.communicate(timeout=60)[1]

    assert "the configuration was reloaded" in on[0]
    assert "pcie_throughput in" in invalid[0]
    assert [before, on[1], invalid[1], off[1]] == [False, True, True, False]
    assert "restart the exporter to apply the new values of ttl_seconds" in restart
    assert "the web configuration was not reloaded: rate_limit in" in web[0]
    assert (popen.returncode, "Traceback" in rest) == (0, False)


def test_waiting_passwords_do_not_disturb_the_exit(run_dir: Path, tmp_path: Path) -> None:
    """SIGTERM stops the exporter without a traceback while passwords wait for their check."""
    web_file = tmp_path / "web.yml"
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(8)).decode()
    web_file.write_text(f"basic_auth_users: {{prometheus: {hashed}}}")
    command = [*EXPORTER, "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    command += ["--web.config.file", str(web_file)]
    with ExitStack() as stack:
        popen = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        assert popen.stderr is not None
        served = re.search(r"http://\S+", next(line for line in popen.stderr if "serving" in line))
        assert served is not None
        for number in range(30):
            password = base64.b64encode(f"prometheus:{number}".encode()).decode()
            client = stack.enter_context(connect(served[0]))
            client.sendall(
                f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {password}\r\n\r\n".encode()
            )
        client.recv(1)
        popen.terminate()
        rest = popen.communicate(timeout=60)[1]

    assert popen.returncode == 0, rest
    assert "Traceback" not in rest


def test_a_stop_does_not_end_it(run_dir: Path) -> None:
    """After Ctrl-Z and `fg`, or SIGSTOP and SIGCONT, the exporter goes on serving."""
    command = [*EXPORTER, "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        served = re.search(r"http://\S+", next(line for line in popen.stderr if "serving" in line))
        assert served is not None
        for _ in range(2):
            popen.send_signal(signal.SIGSTOP)
            time.sleep(1.2)  # longer than the exporter waits for a signal
            popen.send_signal(signal.SIGCONT)
            assert status(ask(served[0], GET_HEALTHY)) == 200
        popen.send_signal(signal.SIGSTOP)
        popen.terminate()
        popen.send_signal(signal.SIGCONT)
        rest = popen.communicate(timeout=60)[1]

    assert popen.returncode == 0, rest


def test_further_signals_have_no_effect(run_dir: Path) -> None:
    """Signals that arrive while the exporter stops cause no traceback."""
    command = [*EXPORTER, "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        next(line for line in popen.stderr if "serving" in line)
        while popen.poll() is None:
            popen.send_signal(signal.SIGINT)
            popen.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        rest = popen.stderr.read()

    assert popen.returncode == 0, rest
    assert "Traceback" not in rest


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from torchmem.sample.errors import TorchmemError
from torchmem.exporter import main
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import ALL_INTERFACES, ExporterSettings
from torchmem.exporter.sample_files import RunDirectory
from torchmem.demo.simulated_nvml import FakeNvml

exporter = Exporter(FakeNvml.of(), RunDirectory(Path("none")))
free = os.dup(0)
os.close(free)
# One descriptor is enough to listen, and too few for an event loop.
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
try:
    main.serve_until_signal(exporter, ExporterSettings(listen="127.0.0.1:0"))
except TorchmemError as error:
    sys.exit(f"torchmem: {error}")
"""


def test_server_that_stops_by_itself_is_a_failure() -> None:
    """If the server stops, the exporter exits with 1, so that its supervisor restarts it."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 1, ended.stderr
    assert "torchmem: the HTTP server stopped by itself" in ended.stderr


def test_taken_port_is_one_sentence_and_code_2(run_dir: Path) -> None:
    """The second exporter on a port exits with one sentence that says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ended = run("--listen", address, "--run-dir", str(run_dir))

    assert ended.returncode == 2
    assert ended.stderr.startswith(f"torchmem: cannot listen on {address}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("lisen: x", "unknown key 'lisen' in {file}, line 1: did you mean 'listen'?"),
        (
            "colour: red",
            "unknown key 'colour' in {file}, line 1: known keys are listen, systemd_socket",
        ),
        ("\n\n3: x", "unknown key '3' in {file}, line 3"),
        ("listen: 9847", "listen in {file}, line 1, is 9847: give text"),
        ("ttl_seconds: soon", "ttl_seconds in {file}, line 1, is 'soon': give a positive number"),
        ("ttl_seconds: -1", "ttl_seconds in {file}, line 1, is -1: give a positive number"),
        ("ttl_seconds: .nan", "ttl_seconds in {file}, line 1, is nan: give a positive number"),
        (
            "listen: :1\npcie_throughput: maybe",
            "pcie_throughput in {file}, line 2, is 'maybe': give true or false",
        ),
        (
            "processes_per_gpu: 1.5",
            "processes_per_gpu in {file}, line 1, is 1.5: give a whole number of processes",
        ),
        ("listen: {host: a}", "listen in {file}, line 1, is a mapping: give text"),
        ("listen: :1\nlisten: :2", "duplicate key 'listen' in {file}, line 2: keep one."),
        ('run_dir: "a\\0b"', "run_dir in {file}, line 1, is not a path"),
        ('run_dir: "a\\eb"', "run_dir in {file}, line 1, is not a path"),
        ("listen: 2001-99-99", "{file} is not valid YAML"),
        ("listen: !!timestamp today", "{file} is not valid YAML"),
        ("ttl_seconds: " + "9" * 5000, "the number in {file}, line 1, is too long"),
        ("ttl_seconds: 0x" + "f" * 5000, "the number in {file}, line 1, is too long"),
        ("\nlisten: [1" + ":1" * 50_000 + "]", "the number in {file}, line 2, is too long"),
        ("ttl_seconds: " + "9" * 40, "ttl_seconds in {file}, line 1, is 9999"),
        ("? [a]\n: b", "a key in {file}, line 1, is not text"),
        ("- listen", "{file} must hold `key: value` lines"),
        ("a: [", "{file} is not valid YAML at line 1"),
    ],
)
def test_error_in_the_configuration_file(tmp_path: Path, content: str, expected: str) -> None:
    """The error names the key, the file and the line, and suggests a correction."""
    file = tmp_path / "exporter.yml"
    file.write_text(content)

    with pytest.raises(UsageError, match=re.escape(expected.format(file=file))):
        config.load(file, {})


def test_print_config_prints_a_configuration_file(tmp_path: Path) -> None:
    """`--print-config` prints the effective settings as a file that gives the same settings."""
    file = tmp_path / "exporter.yml"
    file.write_text(
        "listen: host:1\nttl_seconds: 5\npcie_throughput: true\nrun_dir: 'on: tape #1'\n"
    )
    flags = (
        "--listen",
        ":7",
        "--no-pcie-throughput",
        "--processes-per-gpu",
        "3",
        "--web.config.file",
        "none.yml",
    )
    printed = run("--config", str(file), *flags, "--print-config")
    file.write_text(printed.stdout)
    settings = config.load(file, {})

    assert (printed.returncode, printed.stderr) == (0, "")
    assert (
        settings.listen, settings.ttl_seconds, settings.pcie_throughput, settings.processes_per_gpu
    ) == (":7", 5, False, 3)  # fmt: skip
    assert (Path("on: tape #1"), Path("none.yml")) == (settings.run_dir, settings.web_config_file)
    assert printed.stdout == run("--config", str(file), "--print-config").stdout


def test_every_setting_has_a_flag() -> None:
    """Every setting of the file has a flag, whose default is None."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = vars(parser.parse_args([]))

    assert [None] * len(fields(ExporterSettings)) == [
        given[setting.name] for setting in fields(ExporterSettings)
    ]


@pytest.mark.parametrize(
    "flag", ["--ttl-seconds=0", "--scrape-deadline-seconds=nan", "--processes-per-gpu=-1"]
)
def test_invalid_number_in_a_flag_is_code_2(flag: str) -> None:
    """Numbers in flags are checked as in the file."""
    ended = run(flag, "--once")

    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)


def test_systemd_is_notified_over_a_socket_it_passed(run_dir: Path, tmp_path: Path) -> None:
    """The exporter serves on systemd's socket and reports READY, WATCHDOG and STOPPING."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.create_server(("127.0.0.1", 0)) as passed,
    ):
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        serving = [
            "sh",
            "-c",
            'exec env LISTEN_PID=$$ "$@" 3<&0',
            "sh",
            *EXPORTER,
            "--web.systemd-socket",
        ]
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "LISTEN_FDS": "1"}
        with subprocess.Popen(
            [*serving, "--run-dir", str(run_dir)],
            stdin=passed.fileno(),
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as popen:
            heard = {manager.recv(99)}
            while heard < {b"READY=1", b"WATCHDOG=1"}:
                heard.add(manager.recv(99))
            answered = urllib.request.urlopen(
                f"http://127.0.0.1:{passed.getsockname()[1]}/-/healthy"
            ).status
            popen.send_signal(signal.SIGTERM)
            while b"STOPPING=1" not in heard:
                heard.add(manager.recv(99))
            popen.communicate(timeout=60)

    assert (answered, popen.returncode) == (200, 0)
    assert heard == {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}


@pytest.mark.parametrize(
    "environment", [{}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_FDS": "2"}]
)
def test_missing_systemd_socket_is_one_sentence(environment: dict[str, str]) -> None:
    """Without exactly one socket for this process, the error names the .socket unit."""
    with pytest.raises(UsageError, match=r"\.socket unit"):
        main.systemd_listener({"LISTEN_PID": str(os.getpid()), **environment})


def test_missing_configuration_file_is_named(tmp_path: Path) -> None:
    """The error contains the path."""
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none.yml"))):
        config.load(tmp_path / "none.yml", {})


def test_flag_wins_over_file_over_default(tmp_path: Path) -> None:
    """A flag overrides the file, and the file overrides the default."""
    file = tmp_path / "exporter.yml"
    file.write_text("listen: 0.0.0.0:1\nttl_seconds: 5\n")

    settings = config.load(file, {"listen": ":9", "run_dir": None})

    assert (
        settings.address,
        settings.ttl_seconds,
        settings.scrape_deadline_seconds,
    ) == ((ALL_INTERFACES, 9), 5, 5.0)


@pytest.mark.parametrize("listen", ["", "localhost", "host:", "host:http", "host:99999"])
def test_invalid_address(listen: str) -> None:
    """The error shows the format of a listen address."""
    with pytest.raises(UsageError, match=r"HOST:PORT"):
        _ = config.load(None, {"listen": listen}).address


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("[::1]:9847", ("::1", 9847)), ("localhost:0", ("localhost", 0)), (":1", (ALL_INTERFACES, 1))],
)
def test_address_forms(listen: str, expected: tuple[str, int]) -> None:
    """Addresses can be IPv6 in brackets, host names, or a port on all interfaces."""
    assert config.load(None, {"listen": listen}).address == expected
