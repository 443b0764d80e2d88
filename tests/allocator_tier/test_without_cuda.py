"""The SDK with a PyTorch without CUDA, where a script must run as it does without the SDK."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.allocator

SCRIPT = """
import os, torch
from torchmem import sdk
session = sdk.instrument(port=0)
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    (weight - 1).square().sum().backward()
    optimizer.step()
assert not torch.cuda.is_initialized()
assert sdk.instrument() is session
errors = sum(session.errors.counts.values())
threads = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
is_sampled = "torchmem-sdk\\n" in threads
print(round(weight.sum().item(), 2), is_sampled, session.url, errors)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No GPU, and a run directory of the test's own."""
    return {
        "PATH": "/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
    }


def test_a_cpu_run_is_left_alone(environment: dict[str, str], tmp_path: Path) -> None:
    """Without CUDA a training loop has the same result, and no thread, port, file, or error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "3.02 False None 0\n", "")
    assert not (tmp_path / "run").exists()


CLOSED_IN_A_HOOK = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchmem import sdk
session = sdk.instrument()
register_optimizer_step_post_hook(lambda *_: session.close())
register_optimizer_step_post_hook(lambda *_: None)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
optimizer.step()
again = sdk.instrument()
optimizer.step()
print(session.closed, again is not session)
"""


def test_a_session_may_be_closed_during_a_step(environment: dict[str, str]) -> None:
    """`close()` while PyTorch runs its hooks does not make the step fail."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLOSED_IN_A_HOOK],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


def test_importing_the_sdk_does_not_import_torch(environment: dict[str, str]) -> None:
    """`from torchmem import sdk` alone costs no import of PyTorch."""
    script = "import sys; from torchmem import sdk; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )

    assert done.stdout == "False\n"
