"""The command `python -m torchmem.phantom --gpu-model NAME -- COMMAND`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import os
names = "GPU_MODEL", "MEMORY", "MULTIPROCESSORS", "DEVICES"
print(*[os.environ["PHANTOM_" + name] for name in names])
"""
BARE = ["env", "-u", "PYTHONPATH", str(Path(sys.executable).resolve()), "-S", "-c", SHOW]


def run(cache: dict[str, str], tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these arguments."""
    command = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--state",
        str(tmp_path / "state"),
        *arguments,
    ]
    return subprocess.run(
        command, env=cache, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "h100-80gb 85020639232 132 1"),
        (["--gpu-model", "t4"], "t4-16gb 15828254720 40 1"),
        (["--memory", "9GB", "--gpus", "2"], "9GB 9000000000 132 2"),
        (["--gpu-model", "t4", "--memory", "8GiB"], "t4-16gb 8589934592 40 1"),
    ],
    ids=["default", "model", "memory", "both"],
)
def test_the_flags_choose_the_gpu(
    cache: dict[str, str], tmp_path: Path, flags: list[str], expected: str
) -> None:
    """The environment of the command has the GPU, the number of GPUs and their memory."""
    done = run(cache, tmp_path, *flags, "--", *BARE)

    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_a_run_inside_a_run_has_the_same_gpu(cache: dict[str, str], tmp_path: Path) -> None:
    """Without flags, a run uses the GPU of the run around it."""
    inner = [sys.executable, "-m", "torchmem.phantom", "--", *BARE]

    done = run(
        cache, tmp_path, "--gpu-model", "l4", "--memory", "20GB", "--gpus", "3", "--", "env", *inner
    )

    assert done.stdout.strip() == "l4-24gb 20000000000 58 3", done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu-model", "h10", "--", "true"], "'h10' is not a known GPU"),
        (["--memory", "lots", "--", "true"], "'lots' is not a known GPU"),
        (["--gpus", "99", "--", "true"], "'99' is not a number of GPUs from 1 to 16"),
        (["--machine", "256", "--", "true"], "'256' is not the number of a machine from 0 to 255"),
        (
            ["--addresses", "random", "--", "true"],
            "'random' is not an order of addresses: use reuse",
        ),
        ([], "no command: add one after --"),
        (["--", "no-such-program"], "cannot run 'no-such-program': check its name"),
    ],
)
def test_a_usage_error_is_one_sentence(
    cache: dict[str, str], tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    """It is printed to stderr, with exit code 2."""
    done = run(cache, tmp_path, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"phantom: {sentence}")
    assert len(done.stderr.splitlines()) == 1
