"""`git bisect run` with `torchmem preflight --baseline`, with PyTorch's real allocator."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.git import GitRepo
from support.phantom import torch_server

pytestmark = pytest.mark.allocator

SCRIPT = """
import torch

from model import model

optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    {}.backward()
    optimizer.step()
"""
MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1024, 1024)
        self.kept = []

    def forward(self, x):
        y = self.inner(x)
        return y.square().mean()


model = Model().cuda()
"""


@pytest.fixture
def repo(tmp_path: Path) -> GitRepo:
    """Return a repository whose second commit of three keeps the output of each step."""
    repo = GitRepo(tmp_path / "repo")
    loss = 'model(torch.zeros(1024, 1024, device="cuda"))'
    repo.commit({"train.py": SCRIPT.format(loss), "model.py": MODEL}, "Train")
    changed = MODEL.replace("        return", "        self.kept.append(y)\n        return")
    repo.commit({"model.py": changed}, "Keep the outputs")
    repo.commit({"README": "A model"}, "Add a README")
    return repo


def run(command: Sequence[str], repo: GitRepo) -> str:
    """Return the output of a command in the repository, which must succeed."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=repo.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commit_that_keeps_memory(repo: GitRepo, tmp_path: Path) -> None:
    """`git bisect run` finds it, as docs/preflight.md says, with the line of the module."""
    flags = ("preflight", "--beside-gpu", "--gpu-model", "1GB", "--tolerance", "10%")
    program = ("--", *torch_server().python(), "train.py")
    preflight = [sys.executable, "-m", "torchmem.cli", *flags]
    baseline = str(tmp_path / "good.json")
    repo.git("checkout", "--quiet", "HEAD~2")
    run([*preflight, "--save-baseline", baseline, *program], repo)
    repo.git("bisect", "start", "main", "HEAD")
    at_each = shlex.join([*preflight, "--baseline", baseline, *program])
    skipping = f"{at_each}; code=$?; test $code = 2 && exit 125; exit $code"
    answer = run(["git", "bisect", "run", "sh", "-c", skipping], repo)
    first_bad = repo.git("rev-parse", "main~1").strip()
    assert f"{first_bad} is the first bad commit" in answer
    assert "held" in answer
    assert "model.py:12" in answer
