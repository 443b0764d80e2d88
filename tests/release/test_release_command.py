"""`torchmem release` as a process: whom it asks, what it shows, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.publishing import own_sample, publish
from support.users import as_user, needs_root

from torchmem.cli.main import command_line
from torchmem.sample.errors import UsageError
from torchmem.sample.process_messages import encode, sibling_path
from torchmem.sample.release_messages import (
    ANSWER_SUFFIX,
    REQUEST_SUFFIX,
    ReleaseAnswer,
    decode_request,
)

GIB = 1 << 30


def release(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "release", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def answering(sample: Path, answer: ReleaseAnswer) -> Iterator[list[bytes]]:
    """Answer the next request as a process would; yields the requests that came."""
    requests: list[bytes] = []
    ended = threading.Event()

    def serve() -> None:
        path = sibling_path(sample, REQUEST_SUFFIX)
        while not requests and not ended.is_set():
            time.sleep(0.01)
            if path.exists():
                requests.append(path.read_bytes())
                content = json.loads(encode(answer)) | {"request_ns": path.stat().st_mtime_ns}
                sibling_path(sample, ANSWER_SUFFIX).write_text(json.dumps(content))

    thread = threading.Thread(target=serve)
    thread.start()
    yield requests
    ended.set()
    thread.join()


def test_it_shows_what_came_back_from_whom(tmp_path: Path) -> None:
    """The process's bytes and time, and the sum of the GPU; the files of the request are gone."""
    path = publish(tmp_path, own_sample())
    with answering(path, ReleaseAnswer(0, "done", {"GPU-1": 3 * GIB}, 0.25)) as requests:
        shown = release("--pid", str(os.getpid()), "--hooks", "1.5", "--run-dir", tmp_path)

    assert (shown.returncode, shown.stderr) == (0, "")
    first, _, last = shown.stdout.splitlines()
    assert first.endswith(f"(pid {os.getpid()}): returned 3.00 GiB in 250 ms")
    assert last == "GPU-1: 3.00 GiB returned to the driver"
    assert decode_request(requests[0]).hook_bytes == 3 * GIB // 2
    assert [path] == [file for file in path.parent.iterdir() if not file.name.startswith(".")]


def test_a_refusal_is_shown_and_fails(tmp_path: Path) -> None:
    """The reason of a process that refuses is on its line, and the exit code is 1."""
    path = publish(tmp_path, own_sample())
    refusal = ReleaseAnswer(0, "refused", {}, 0.0, "a CUDA graph is being captured.")
    with answering(path, refusal):
        shown = release("--pid", str(os.getpid()), "--run-dir", tmp_path)

    assert (shown.returncode, shown.stderr) == (1, "")
    assert "refused: a CUDA graph is being captured\n" in shown.stdout
    assert "Nothing was returned to the driver." in shown.stdout


def test_a_process_that_does_not_answer_is_not_waited_for_forever(tmp_path: Path) -> None:
    """After the timeout the command says so, and takes its request back."""
    path = publish(tmp_path, own_sample())
    shown = release("--pid", str(os.getpid()), "--timeout", "0.3", "--run-dir", tmp_path)

    assert (shown.returncode, "no step ended within 0.3 s" in shown.stdout) == (1, True)
    assert not sibling_path(path, REQUEST_SUFFIX).exists()


def test_a_request_from_the_future_is_no_other_release(tmp_path: Path) -> None:
    """After the clock was set back, a request that was left behind is replaced."""
    path = publish(tmp_path, own_sample())
    left = sibling_path(path, REQUEST_SUFFIX)
    left.write_bytes(b"{}")
    os.utime(left, (time.time() + 7200, time.time() + 7200))
    shown = release("--pid", str(os.getpid()), "--timeout", "0.3", "--run-dir", tmp_path)

    assert (shown.returncode, "no step ended within 0.3 s" in shown.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "name the processes to ask: --gpu, --run, --launch, --rank or --pid."),
        (["--rank", "99"], "no running process in {} matches"),
        (["--gpu", "GPU-9"], "no running process in {} matches"),
        (
            ["--gpu", "0"],
            "--gpu: NVML does not respond: the driver's library",
        ),
        (["--rank", "0", "--timeout", "0"], "--timeout must be above 0 and at most 600."),
        (["--rank", "0", "--timeout", "nan"], "--timeout must be above 0 and at most 600."),
        (["--rank", "0", "--hooks", "-1"], "--hooks must be from 0 to 1024, in GiB."),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path: Path, arguments: list[str], error: str) -> None:
    """Flags that select nothing, or are out of bounds, end with code 2 and what to do."""
    publish(tmp_path, own_sample())
    shown = release(*arguments, "--run-dir", tmp_path)

    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"torchmem: {error.format(tmp_path)}")
    assert shown.stderr.count("\n") == 1


@needs_root
def test_other_users_processes_are_not_asked(shared_dir: Path) -> None:
    """A user who is not root finds no process of another one, and leaves no file."""
    path = publish(shared_dir, own_sample())
    before = sorted(path.parent.iterdir())
    parsed = command_line().parse_args(["release", "--rank", "0", "--run-dir", str(shared_dir)])

    def ask() -> str:
        with pytest.raises(UsageError) as caught:
            parsed.run(parsed)
        return str(caught.value)

    assert "no running process" in as_user(61001, ask)
    assert before == sorted(path.parent.iterdir())
