"""`torchmem preflight --bisect` with PyTorch's real allocator, in a real git repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    """Return a repository whose second commit keeps the output of each step."""
    repo = GitRepo(tmp_path / "repo")
    loss = 'model(torch.zeros(1024, 1024, device="cuda"))'
    repo.commit({"train.py": SCRIPT.format(loss), "model.py": MODEL}, "Train")
    changed = MODEL.replace("        return", "        self.kept.append(y)\n        return")
    repo.commit({"model.py": changed}, "Keep the outputs")
    return repo


def test_the_commit_that_keeps_memory(repo: GitRepo, tmp_path: Path) -> None:
    """It is found, with the line of the repository's module, and the checkout is unchanged."""
    flags = ("--beside-gpu", "--gpu-model", "1GB", "--json", "--bisect", "HEAD~1..HEAD")
    program = (*torch_server().python(), "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "preflight", *flags, "--", *program],
        cwd=repo.folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    largest = document["changes"][0]
    assert document["commit"]["subject"] == "Keep the outputs"
    assert (largest["component"], largest["file"], largest["line"]) == ("held", "model.py", 12)
    assert repo.git("status", "--porcelain") == ""
    assert len(repo.git("worktree", "list").splitlines()) == 1
