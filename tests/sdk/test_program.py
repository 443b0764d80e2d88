"""The name of a run after notebooks that a command executes, and functions that submitit calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRINT_RUN = """
from torchmem.sdk.identity import identify
from torchmem.sdk.settings import Settings
process = identify(Settings(), {}, {})
print(process.run, process.script)
"""
# Starts a kernel, as nbclient does.
EXECUTE = """
import subprocess, sys
subprocess.run([sys.executable, sys.argv[1]], check=True)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("papermill in/train.ipynb out/result.ipynb", "train train.ipynb"),
        ("jupyter-execute train.ipynb", "train train.ipynb"),
        ("jupyter-nbconvert --execute train.ipynb --to html", "train train.ipynb"),
        ("jupyter-nbconvert --output done.ipynb --execute train.ipynb", "train train.ipynb"),
        ("jupyter-nbconvert --execute a.ipynb b.ipynb", "experiments None"),
        ("jupyter-lab train.ipynb", "experiments None"),
        ("sweep.py", "experiments None"),
    ],
)
def test_an_executed_notebook_names_the_run(command: str, expected: str, tmp_path: Path) -> None:
    """The command that executes a notebook names it; otherwise the kernel's folder does."""
    program, *arguments = command.split()
    folder = tmp_path / "experiments"
    folder.mkdir()
    (tmp_path / program).write_text(EXECUTE)
    kernel = tmp_path / "ipykernel_launcher.py"
    kernel.write_text(PRINT_RUN)
    started = [sys.executable, str(tmp_path / program), str(kernel), *arguments]
    done = subprocess.run(started, cwd=folder, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == expected


# What submitit 1.5 has in these files, as far as a job's function sees it.
UTILS = """
class DelayedSubmission:
    def __init__(self, function):
        self.function = function

    def result(self):
        return self.function()
"""
SUBMIT = """
import functools, importlib.util, sys

def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

utils, script = load(sys.argv[1] + "/submitit/core/utils.py"), load(sys.argv[1] + "/train.py")
function = {"plain": script.main, "partial": functools.partial(script.main),
            "object": script.Trainer()}.get(sys.argv[2])
if function:
    utils.DelayedSubmission(function).result()
else:
    script.main()
"""
TRAIN = f"""
def main():
    exec({PRINT_RUN!r}, {{}})

class Trainer:
    def __call__(self):
        main()
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", "train train.py"),
        ("partial", "train train.py"),
        ("object", "train train.py"),
        ("unknown", "submitit None"),
    ],
)
def test_a_submitted_function_names_the_run(kind: str, expected: str, tmp_path: Path) -> None:
    """A job of submitit is named after the file with its function, and never `_submit`."""
    folder = tmp_path / "submitit" / "core"
    folder.mkdir(parents=True)
    (folder / "utils.py").write_text(UTILS)
    (folder / "_submit.py").write_text(SUBMIT)
    (tmp_path / "train.py").write_text(TRAIN)
    started = [sys.executable, str(folder / "_submit.py"), str(tmp_path), kind]
    done = subprocess.run(started, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == expected
