"""What the traceback of PyTorch's own OutOfMemoryError says about it, in real scripts.

tests/sdk/test_traceback_note.py has the hooks of other tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launched_node import Node
from support.phantom import run_on_phantom, torch_server

from torchmem.explain.oom_report import decode
from torchmem.explain.traceback_note import note_lines
from torchmem.sample.run_directory import REPORT_SUFFIX

pytestmark = pytest.mark.allocator

START = """
import multiprocessing, os, sys, threading, torch
from torchmem import sdk
sdk.instrument()
def fail(*_): return torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
"""
LEAK = """
import torch
from torchmem import sdk

def train():
    kept = []
    while True:
        kept.append(torch.ones(16 << 20, device="cuda"))
        weight = torch.nn.Linear(256, 256).cuda()
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
        for _ in range(2):
            weight(torch.ones(4, 256, device="cuda")).sum().backward()
            optimizer.step()

sdk.instrument(history=True)
train()
"""
GOLDEN = """\
Traceback (most recent call last):
  File "<script>", line 7, in <module>
    held = fail()
           ^^^^^^
  File "<script>", line 5, in fail
    def fail(*_): return torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
torch.OutOfMemoryError: CUDA out of memory. <PyTorch's own numbers>
torchmem: A step does not fit: it needs at least <size> more
torchmem: `torchmem why <report>` explains it"""
Failing = Callable[..., subprocess.CompletedProcess[str]]
IN_CHILD = """
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=fail)
    process.start(); process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    """Runs a script on a GPU of 4 GiB, publishing into `tmp_path`."""

    def run(
        body: str, *arguments: str, start: str = START, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "train.py"
        path.write_text(start + body)
        own = {
            "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
            "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
            "TORCHMEM_INTERVAL": "0.02",
        }
        return run_on_phantom(path, *arguments, memory="4GiB", environment=own | variables)

    return run


def expected(folder: Path) -> list[str]:
    """Return the lines about the only report in a folder."""
    (path,) = folder.rglob(f"*{REPORT_SUFFIX}")
    return [f"torchmem: {line}" for line in note_lines(decode(path.read_bytes()), path)]


def python_lines(text: str) -> list[str]:
    """Return a text without the warnings of PyTorch's allocator."""
    return [line for line in text.splitlines() if "CUDACachingAllocator.cpp" not in line]


def told(text: str) -> list[str]:
    """Return the lines of torchmem's in a text."""
    return [line for line in text.splitlines() if line.startswith("torchmem: ")]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its traceback has no carets")
def test_the_whole_of_stderr(tmp_path: Path) -> None:
    """A script that dies of it leaves Python's traceback with the lines at its end, and no more."""
    node, script = Node(tmp_path, gpus=1), tmp_path / "train.py"
    script.write_text(f"{START}\nheld = fail()\n")
    done = subprocess.run(
        node.command(sys.executable, script),
        env=node.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    text = "\n".join(python_lines(done.stderr)).replace(str(script), "<script>")
    text = re.sub(r"(CUDA out of memory\.) .*", r"\1 <PyTorch's own numbers>", text)
    text = re.sub(r"[\d.]+ [KMG]iB more", "<size> more", text)
    text = re.sub(r"torchmem why \S+" + re.escape(REPORT_SUFFIX), "torchmem why <report>", text)
    assert (done.returncode, text) == (1, GOLDEN)


def test_the_exception_is_pytorchs(failing: Failing) -> None:
    """Its type, text, arguments and traceback are as without torchmem, also when it is pickled."""
    done = failing("""
import pickle, traceback
def show(kind, error, tb):
    last = traceback.extract_tb(tb)[-1].name
    print(kind is torch.OutOfMemoryError is type(error), error.args == (str(error),), last)
    copy = pickle.loads(pickle.dumps(error))
    print(str(copy) == str(error), "torchmem:" in str(error), type(copy) is kind)
sys.excepthook, previous = show, sys.excepthook
fail()
""")

    assert done.stdout.splitlines() == ["True True fail", "True False True"]


def test_a_caught_error_says_nothing(failing: Failing) -> None:
    """One that the script drops leaves no line, and no note."""
    done = failing("""
for _ in range(3):
    try: fail()
    except torch.OutOfMemoryError as error: print(hasattr(error, "__notes__"))
""")

    assert (done.returncode, done.stdout) == (0, "False\n" * 3)
    assert python_lines(done.stderr) == []


def test_the_variable_switches_it_off(failing: Failing) -> None:
    """TORCHMEM_NOTE_ON_OOM=0 leaves Python's own traceback."""
    done = failing("fail()", TORCHMEM_NOTE_ON_OOM="0")

    assert "OutOfMemoryError: CUDA out of memory." in done.stderr.splitlines()[-1]
    assert told(done.stderr) == []


def test_a_thread_says_why(failing: Failing, tmp_path: Path) -> None:
    """The lines end the traceback of the thread."""
    done = failing("thread = threading.Thread(target=fail); thread.start(); thread.join()")

    assert done.returncode == 0
    assert done.stderr.splitlines()[-2:] == expected(tmp_path)


def test_the_backward_pass_says_why(failing: Failing, tmp_path: Path) -> None:
    """An error that a thread of autograd raised ends the script like any other."""
    done = failing("""
x = torch.ones(256 << 20, device="cuda", requires_grad=True)
y = x * 2
pin = torch.empty(1200 << 20, dtype=torch.uint8, device="cuda")
y.backward(torch.ones(1, device="cuda").expand_as(y))
""")

    assert "backward" in told(done.stderr)[0]
    assert done.stderr.splitlines()[-2:] == expected(tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the lines are at the end instead")
def test_the_error_in_a_chain_says_why(failing: Failing, tmp_path: Path) -> None:
    """The note is below the OutOfMemoryError from which the last exception comes."""
    done = failing("""
try: fail()
except torch.OutOfMemoryError as error: raise RuntimeError("epoch 3 failed") from error
""")

    assert done.stderr.splitlines()[-1] == "RuntimeError: epoch 3 failed"
    assert told(done.stderr) == expected(tmp_path)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_says_why(failing: Failing, tmp_path: Path, method: str) -> None:
    """A child of multiprocessing, which writes its traceback itself, says it once."""
    done = failing(IN_CHILD, method)

    assert done.returncode == 1
    assert told(done.stderr) == expected(tmp_path)


def test_a_rank_of_torch_multiprocessing_says_why(failing: Failing, tmp_path: Path) -> None:
    """It sends its traceback to the parent, and so writes the lines itself."""
    done = failing("""
if __name__ == "__main__": torch.multiprocessing.spawn(fail, nprocs=1)
""")

    assert "torch.OutOfMemoryError: CUDA out of memory." in done.stderr
    assert told(done.stderr) == expected(tmp_path)


def test_a_rank_of_torch_distributed_says_why(failing: Failing, tmp_path: Path) -> None:
    """The hook of torch.distributed puts the rank before each line of the traceback."""
    done = failing(f"""
torch.cuda.init()
torch.distributed.init_process_group(
    "nccl", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1
)
fail()
""")

    lines = [line.removeprefix("[rank0]: ") for line in done.stderr.splitlines()]
    assert [line for line in lines if line.startswith("torchmem: ")] == expected(tmp_path)


def test_a_leak_names_its_line(failing: Failing, tmp_path: Path) -> None:
    """With recorded stacks the line that holds the memory is named once."""
    done = failing("", start=LEAK)

    lines = told(done.stderr)
    assert lines == expected(tmp_path)
    assert sum("train.py:8 in train" in line for line in lines) == 1


def logged(
    tmp_path: Path, code: str, *, gpus: int = 1, launcher: tuple[str, ...] = ()
) -> list[str]:
    """Run a program under `torchmem run` with a file as stderr; return the lines of the file."""
    node, log = Node(tmp_path, gpus=gpus), tmp_path / "slurm.out"
    program = tmp_path / "train.py"
    program.write_text(code)
    with log.open("wb") as file:
        subprocess.run(
            node.monitored(*launcher, *torch_server().python(), program),
            env=node.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=300,
            check=False,
        )
    return python_lines(log.read_text())


OOM = """
import os, sys, torch
held = torch.ones(1 << 28, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
def fail(): return torch.empty(8 << 30, dtype=torch.uint8, device=held.device)
"""
PEAK = r"torchmem: peak 1\.\d of 4\.0 GiB \(2\d%\), 2\.\d GiB left"


def test_run_adds_the_peak_to_a_file(tmp_path: Path) -> None:
    """What the traceback has said is not repeated."""
    *_, why, command, peak = logged(tmp_path, f"{OOM}fail()")

    assert [why, command] == expected(tmp_path)
    assert re.fullmatch(PEAK, peak)


def test_run_adds_two_lines_to_a_file_without_a_traceback(tmp_path: Path) -> None:
    """A program that shows the error in its own way and exits still leaves why it died."""
    text = f"{OOM}\ntry: fail()\nexcept torch.OutOfMemoryError: sys.exit('reduce the batch')\n"
    own, first, second = logged(tmp_path, text)

    assert own == "reduce the batch"
    assert re.match(f"{PEAK}; .* does not fit", first)
    assert "torchmem why" in second


def test_run_adds_nothing_to_a_file_after_an_oom_that_was_survived(tmp_path: Path) -> None:
    """A program that has caught the error and goes on to its end has not died of it."""
    text = f"{OOM}\ntry: fail()\nexcept torch.OutOfMemoryError: pass\n"
    assert logged(tmp_path, text) == []


def test_a_rank_that_died_is_named(tmp_path: Path) -> None:
    """Of two ranks, the one that died of it writes its lines, although it is not local rank 0."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    text = f"{OOM}\nif os.environ['RANK'] == '1': fail()\nimport time; time.sleep(600)\n"
    lines = logged(tmp_path, text, gpus=2, launcher=(*launcher, "--nproc-per-node", "2"))

    ours: list[Any] = [line for line in lines if line.startswith("torchmem: ")]
    assert ours[:2] == expected(tmp_path)
    assert re.match(r"torchmem: rank 1, peak 1\.\d of 4\.0 GiB", ours[2])
    assert len(ours) == 3
