"""`torchmem run` around programs that fail: what they print and how they end is their own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.users import may_mount

RUN = [sys.executable, "-m", "torchmem.cli", "run", "--"]
PYTHON = [sys.executable, "-B", "-W", "ignore"]
MAX_SECONDS = 120
# Stands for torch with CUDA before CUDA is initialized: whatever is looked up in it is there.
ANYTHING = """
import sys, types
from importlib.machinery import ModuleSpec

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {"__init__": lambda self, *a, **k: None})

class Anything(type):
    def __getattr__(self, name):
        return __getattr__(name)

class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("torch.") else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.__getattr__ = __getattr__

sys.meta_path.append(Finder())
"""
TORCH = {
    "anything.py": ANYTHING,
    "__init__.py": "from torch.anything import __getattr__\n"
    "import torch._C, torch.cuda, torch.version\n"
    "__version__ = '2.13.0'\n",
    "_C.py": "from torch.anything import __getattr__\n",
    "version.py": "hip = None\n",
    "cuda/__init__.py": "from torch.anything import __getattr__\n"
    "def is_initialized(): return False\n",
}
# What replaces a file of it: PyTorch 1.13 has no hooks of optimizers; other files are broken.
BROKEN = (
    ("optim/optimizer.py", "class Optimizer: pass\n"),
    ("anything.py", "def __getattr__(name): raise AttributeError(name)\n"),
    ("cuda/_utils.py", "raise OSError('libcudart.so.11.0: cannot open shared object file')\n"),
    ("cuda/__init__.py", "def __getattr__(name): raise RuntimeError(name)\n"),
    ("__init__.py", "from torch import _C\n__version__ = '1.13.1'\n"),
    ("__init__.py", "from torch import _C\nimport not_installed\n"),
    ("__init__.py", "import ctypes; ctypes.CDLL('libtorch_cuda.so.0')\n"),
    ("__init__.py", "raise RuntimeError('half an import')\n"),
    ("__init__.py", "def f(:\n"),
    ("__init__.py", "from torch import _C\nraise SystemExit(7)\n"),
    ("_C.py", "raise ImportError('undefined symbol: _ZN3c104cuda')\n"),
)
IMPORTS = (
    "import torch",
    "import os",
    "from torch import nothing_of_this",
    "import importlib.util; print(importlib.util.find_spec('torch') is None)\nimport torch",
    "try:\n    import torch\nexcept BaseException as error:\n    print(repr(error))\nimport torch",
    "import threading as t\nt = t.Thread(target=__import__, args=['torch'])\nt.start(); t.join()",
)
ENDS = (
    "print('done')",
    "import not_there",
    "raise ValueError('mine')",
    "import sys; print('bad', file=sys.stderr); sys.exit('mine')",
    "import sys; sys.exit(3)",
    "import os; os._exit(5)",
    "import os; os.abort()",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "raise KeyboardInterrupt",
    "print(input())",
    "def broken(:",
)
ENVIRONMENTS: tuple[Mapping[str, str], ...] = (
    {},
    {"HOME": "/proc/1/nowhere", "TMPDIR": "/proc/1/nowhere"},
    {"TORCHMEM_RUN_DIR": "/dev/null"},
    {"TORCHMEM_RUN_DIR": "/proc/1/nowhere"},
    {"TORCHMEM_INTERVAL": "often"},
    {"TORCHMEM_NOT_A_SETTING": "1"},
    {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "2"},
)


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    out: bytes
    errors: bytes


def ended(command: list[str], environment: Mapping[str, str], folder: Path) -> Ended:
    """Run a command in `folder`, with its modules."""
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        input=b"answer\n",
        capture_output=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def check_same(command: list[str], environment: Mapping[str, str], folder: Path) -> None:
    """Check that a command ends under `torchmem run` as it does alone, but for one line."""
    plain = ended(command, environment, folder)
    monitored = ended([*RUN, *command], environment, folder)
    lines = monitored.errors.splitlines(keepends=True)
    own = [line for line in lines if line.lower().startswith(b"torchmem")]

    assert len(own) <= 1, own
    without = b"".join(line for line in lines if line not in own)
    assert plain == monitored._replace(errors=without)


def write_torch(folder: Path, name: str = "anything.py", text: str = ANYTHING) -> None:
    """Write the stand-in for torch with one of its files replaced or added."""
    shutil.rmtree(folder / "torch", ignore_errors=True)
    for file, content in {**TORCH, name: text}.items():
        path = folder / "torch" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@example("import torch", "raise KeyboardInterrupt", {})
@given(st.sampled_from(IMPORTS), st.sampled_from(ENDS), st.sampled_from(ENVIRONMENTS))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_program_ends_as_without_torchmem(
    tmp_path: Path, imports: str, end: str, environment: Mapping[str, str]
) -> None:
    """Output, exit code and signal are those of the program alone, and so is its traceback."""
    write_torch(tmp_path)
    (tmp_path / "train.py").write_text(f"{imports}\nprint('started', flush=True)\n{end}\n")

    check_same([*PYTHON, "train.py"], environment, tmp_path)


@given(st.sampled_from(BROKEN), st.sampled_from(IMPORTS))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_torch_that_is_broken_or_too_old_fails_as_without_torchmem(
    tmp_path: Path, broken: tuple[str, str], imports: str
) -> None:
    """A PyTorch that lacks a function, is half installed or raises is the program's own problem."""
    write_torch(tmp_path, *broken)
    (tmp_path / "train.py").write_text(f"{imports}\nprint('trained')\n")

    check_same([*PYTHON, "train.py"], {}, tmp_path)


def test_torch_that_was_looked_for_is_still_watched(tmp_path: Path) -> None:
    """A program that asks whether torch is installed before it imports torch is monitored."""
    write_torch(tmp_path)
    ask = "import importlib.util; assert importlib.util.find_spec('torch')\n"
    show = "import torch, sys; print('torchmem.sdk' in sys.modules)"
    done = ended([*RUN, *PYTHON, "-c", ask + show], {}, tmp_path)

    assert (done.code, done.out) == (0, b"True\n")


@pytest.mark.skipif(not may_mount(), reason="mounting a file system needs root")
def test_a_full_disk_is_no_problem_of_the_program(tmp_path: Path) -> None:
    """With a full /tmp the program runs as without torchmem."""
    write_torch(tmp_path)
    (tmp_path / "train.py").write_text("import torch\nprint('trained')\n")
    (tmp_path / "full").mkdir()
    fill = "mount -t tmpfs -o size=4k none full && head -c 4096 /dev/zero > full/file"
    command = ["unshare", "--mount", "sh", "-c", f'{fill}; exec "$@"', "sh"]
    environment = {"TMPDIR": str(tmp_path / "full"), "TORCHMEM_RUN_DIR": str(tmp_path / "full")}
    plain = ended([*command, *PYTHON, "train.py"], environment, tmp_path)
    monitored = ended([*command, *RUN, *PYTHON, "train.py"], environment, tmp_path)

    assert (plain.code, plain.out) == (0, b"trained\n") == (monitored.code, monitored.out)
    assert monitored.errors.count(b"\n") <= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_kill_at_any_moment_of_the_start_is_a_kill(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A signal that ends Python ends `torchmem run` too, silently, whenever it arrives."""
    write_torch(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    moments = random.Random(int(number))
    for _ in range(8):
        with subprocess.Popen(
            [*RUN, *PYTHON, "-c", "import torch, time; time.sleep(100)"],
            env=environment,
            stderr=subprocess.PIPE,
        ) as process:
            time.sleep(moments.uniform(0, 0.5))
            process.send_signal(number)
            _, errors = process.communicate(timeout=MAX_SECONDS)
        assert (-number, b"") == (process.returncode, errors)
