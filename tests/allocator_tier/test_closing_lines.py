"""The two lines with which `torchmem run` ends on a terminal, after programs on the real allocator.

The terminal is a pseudo-terminal as stderr. tests/allocator_tier/test_traceback_note.py has what
is written to a file after an OOM.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.launched_node import Node
from support.phantom import torch_server

pytestmark = pytest.mark.allocator

# Without an optimizer, whose first step imports torch._dynamo, half of a script's CPU time.
TAKE = """
import os, sys, torch
held = torch.ones(1 << 28, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
"""
OOM = f"{TAKE}\nlast = torch.empty(8 << 30, dtype=torch.uint8, device=held.device)"
LEAK = f"""{TAKE}
weight = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
kept = []
for _ in range(60):
    kept.append(torch.ones(4 << 20, device="cuda"))
    weight(torch.ones(4, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
CHILD = f"{TAKE}\nif os.fork() == 0: sys.exit()\nos.wait()"
PEAK = r"torchmem: peak 1\.\d of 4\.0 GiB \(2\d%\), 2\.\d GiB left"


def on_terminal(node: Node, *command: str) -> tuple[int, list[str]]:
    """Run a command of the node with a terminal as stderr; return its exit code and the lines."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                seen.append(data)
        except OSError:  # the last process has closed the terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            node.monitored(*command),
            env=node.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            timeout=300,
            check=False,
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done.returncode, b"".join(seen).decode().splitlines()


def test_a_program_ends_with_two_lines(tmp_path: Path) -> None:
    """They are the last ones, and the command that they name shows the run."""
    node = Node(tmp_path, gpus=1)
    code, screen = on_terminal(node, sys.executable, "-c", TAKE)

    assert code == 0
    assert len(screen) == 2, screen
    assert re.match(PEAK, screen[0]), screen
    match = re.fullmatch(r"torchmem: `torchmem (why .*)` shows the rest", screen[1])
    assert match, screen
    shown = subprocess.run(
        [sys.executable, "-m", "torchmem.cli", *match[1].split()],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ": exited" in shown.stdout, shown.stderr


def test_after_an_oom_they_follow_the_traceback(tmp_path: Path) -> None:
    """The exit code is the program's own, and what the traceback has said is not repeated."""
    code, screen = on_terminal(Node(tmp_path, gpus=1), *torch_server().python(), "-c", OOM)

    assert code == 1
    assert "OutOfMemoryError" in screen[-4]
    assert "does not fit" in screen[-3]
    assert "torchmem why" in screen[-2]
    assert re.fullmatch(PEAK, screen[-1]), screen


def test_they_say_why_if_the_traceback_does_not(tmp_path: Path) -> None:
    """Without the note of the exception, they have the verdict and the command."""
    command = ["env", "TORCHMEM_NOTE_ON_OOM=0", *torch_server().python(), "-c", OOM]
    _, screen = on_terminal(Node(tmp_path, gpus=1), *command)

    assert "OutOfMemoryError" in screen[-3]
    assert re.match(f"{PEAK}; .* does not fit", screen[-2]), screen
    assert "torchmem why" in screen[-1]


def test_growth_is_told_although_the_program_has_ended_well(tmp_path: Path) -> None:
    """It is judged at the end once more: a second of steps may lie after the last judgment."""
    code, screen = on_terminal(Node(tmp_path, gpus=1), *torch_server().python(), "-c", LEAK)

    assert code == 0
    grows = "; tensors kept between steps grow by 16.00 MiB a step"
    assert grows in screen[0], screen


def test_a_child_that_was_forked_writes_none(tmp_path: Path) -> None:
    """A child that ends as Python does has inherited the call, and keeps silent."""
    _, screen = on_terminal(Node(tmp_path, gpus=1), *torch_server().python(), "-c", CHILD)

    assert len(screen) == 2, screen


def test_of_several_ranks_one_writes_them(tmp_path: Path) -> None:
    """Under torchrun, local rank 0 does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    ranks = ["--nproc-per-node", "2", *torch_server().python(), "-c", TAKE]
    code, screen = on_terminal(Node(tmp_path), *launcher, *ranks)

    assert code == 0
    assert len([line for line in screen if line.startswith("torchmem: peak")]) == 1, screen


@pytest.mark.parametrize("code", [TAKE, f"{TAKE}\nraise SystemExit(7)"])
def test_a_pipe_gets_nothing(tmp_path: Path, code: str) -> None:
    """The stderr of a program is left alone if it is not a terminal, except after an OOM."""
    node = Node(tmp_path, gpus=1)
    done = subprocess.run(
        node.monitored(*torch_server().python(), "-c", code),
        env=node.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "torchmem" not in done.stderr


def test_a_program_without_a_gpu_adds_nothing(tmp_path: Path) -> None:
    """A program that never uses CUDA has no peak to report."""
    program = [*torch_server().python(), "-c", "import torch; raise SystemExit(3)"]
    code, screen = on_terminal(Node(tmp_path, gpus=1), *program)
    assert (code, screen) == (3, [])
