"""`torchmem mcp` as a process: what it imports, prints, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.assistant import COMMAND, sentence
from support.publishing import own_process, own_sample, publish
from support.recordings import varying_lengths, write
from support.waiting import until

from torchmem.mcp.worker import Source, ask

HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}


def message(method: str, number: int | None = None, **parameters: Any) -> bytes:
    """Return a request, or without a number a notification, as one line."""
    request = {"jsonrpc": "2.0", "method": method, "params": parameters}
    return json.dumps(request if number is None else {**request, "id": number}).encode() + b"\n"


def call(number: int, tool: str, **arguments: Any) -> bytes:
    """Return the request of a tool."""
    return message("tools/call", number, name=tool, arguments=arguments)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with one rank, and a snapshot."""
    publish(tmp_path, own_sample(process=own_process(run="nightly")))
    write(varying_lengths(steps=30).snapshot(), tmp_path / "snapshot.pickle")
    return tmp_path


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start the server and shake hands, in the protocol of a year ago."""
    command = [*COMMAND, "--run-dir", str(run_dir)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert server.stdin
    server.stdin.write(message("initialize", 1, **HELLO) + message("notifications/initialized"))
    server.stdin.flush()
    assert answered(server)["id"] == 1
    return server


def answered(server: subprocess.Popen[bytes]) -> Any:
    """Return the next message of the server."""
    assert server.stdout
    return json.loads(server.stdout.readline())


def test_nothing_but_the_protocol_is_on_stdout(run_dir: Path) -> None:
    """All lines on stdout are messages, whatever the commands print, and stderr stays empty."""
    with start(run_dir) as server:
        assert server.stdin
        server.stdin.write(
            call(2, "list_ranks")
            + call(3, "what_if", file=str(run_dir / "snapshot.pickle"))
            + b"junk\n"
            + call(4, "read_snapshot", file="/nope")
        )
        server.stdin.flush()
        answers = dict(_answers(server, 3))
        output, errors = server.communicate(timeout=120)

    assert set(answers) == {2, 3, 4}
    assert [json.loads(line)["jsonrpc"] for line in output.splitlines()] == []
    assert (server.returncode, b"Traceback" in errors) == (0, False)


def _answers(server: subprocess.Popen[bytes], count: int) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    while len(found) < count:
        answer = answered(server)
        if answer.get("id") is not None:
            found.append((answer["id"], answer))
    return found


@pytest.mark.parametrize("line", [b'"\\ud800"', b'"\\uDFFF\\uD800 a"', b'"\xff"', b'"\\u0000"'])
def test_text_that_is_none_has_an_answer(run_dir: Path, line: bytes) -> None:
    """A name with half of a surrogate pair, which the SDK's parser refuses, is one of no rank."""
    asked = call(2, "rank_report", run="NAME").replace(b'"NAME"', line)
    with start(run_dir) as server:
        assert server.stdin
        server.stdin.write(asked)
        server.stdin.flush()
        silence = threading.Timer(300, server.kill)
        silence.start()
        ((_, answer),) = _answers(server, 1)
        silence.cancel()
        server.communicate(timeout=120)

    assert answer["result"]["isError"]
    assert "an error in torchmem" not in answer["result"]["content"][0]["text"]


def test_the_end_of_stdin_ends_it(run_dir: Path) -> None:
    """At the end of stdin the process ends with exit code 0, also before the first message."""
    command = [*COMMAND, "--run-dir", str(run_dir)]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.fixture
def slow_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi on PATH that does not end, which a tool waits for."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def waiting(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the process of a tool and the one that it waits for, once there are both."""
    children = psutil.Process(server.pid).children(recursive=True)
    return children if len(children) == 2 else []


@pytest.mark.usefixtures("slow_driver")
def test_no_process_outlives_it(run_dir: Path) -> None:
    """When stdin ends while a tool works, all processes of the tool end, too."""
    with start(run_dir) as server:
        assert server.stdin
        server.stdin.write(call(2, "rank_report"))
        server.stdin.flush()
        children = until(lambda: waiting(server))
        server.stdin.close()
        assert server.wait(120) == 0

    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (2, [])


@pytest.mark.usefixtures("slow_driver")
def test_a_call_can_be_cancelled(run_dir: Path) -> None:
    """A call that the assistant cancels ends its processes, and has no result."""
    with start(run_dir) as server:
        assert server.stdin
        server.stdin.write(call(2, "rank_report"))
        server.stdin.flush()
        until(lambda: waiting(server))
        server.stdin.write(message("notifications/cancelled", requestId=2))
        server.stdin.flush()
        until(lambda: not psutil.Process(server.pid).children())
        server.stdin.write(message("ping", 3))
        server.stdin.flush()
        found = _answers(server, 1)
        found += _answers(server, 1) if found[0][0] != 3 else []

    assert found[-1][0] == 3
    assert all("result" not in answer for number, answer in found if number == 2)


def test_a_call_that_takes_too_long_is_ended(run_dir: Path) -> None:
    """After the time of a call, its process is ended, and the answer says so."""
    of_other_tests = set(psutil.Process().children())
    question = {"file": str(run_dir / "snapshot.pickle"), "at": None, "gpu": None, "rows": 1}
    asked = ask(Source("/"), "read_snapshot", {**question, "only_leaks": False}, max_seconds=0.01)
    reply = asyncio.run(asked)

    assert reply.is_error
    assert sentence(reply.text).startswith("this took longer than 50 seconds")
    until(lambda: set(psutil.Process().children()) <= of_other_tests)


def test_a_fault_of_ours_is_an_error() -> None:
    """A process that fails is an answer that says so, not the end of the server."""
    reply = asyncio.run(ask(Source("/"), "no_such_tool", {}))

    assert reply.is_error
    assert sentence(reply.text).startswith("this has failed because of an error in torchmem")


def imported(program: str) -> set[str]:
    """Return the packages that a program has imported."""
    code = f"{program}; import sys; print(' '.join({{n.partition('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def test_the_command_imports_nothing_heavy() -> None:
    """The help text needs no extra, and the process of a tool needs no protocol."""
    heavy = {"torch", "numpy", "matplotlib", "rich", "yaml", "starlette", "pydantic", "mcp"}
    answer = "from torchmem.mcp.worker import reply; reply('list_ranks', {'run': None}, '/')"

    assert imported("import torchmem.commands.mcp") & {*heavy, "msgspec"} == set()
    assert imported(answer) & heavy == set()
    assert imported("import torchmem.mcp.server") & {"torch", "numpy", "matplotlib"} == set()


def test_without_the_extra() -> None:
    """Without the SDK of the protocol, the command names the extra to install."""
    program = (
        "import sys; sys.modules['mcp'] = None; "
        "from torchmem.cli.main import main; sys.exit(main(['mcp']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("torchmem: `torchmem mcp` needs the Python package 'mcp")
    assert done.stderr.endswith("run pip install 'torchmem[mcp]'.\n")


def test_the_url_of_an_exporter_is_checked() -> None:
    """A URL that no exporter has is one sentence, without its password."""
    done = subprocess.run(
        [*COMMAND, "--exporter", "ftp://ann:secret@host"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("torchmem: ftp://host is not the URL of an exporter: ")
