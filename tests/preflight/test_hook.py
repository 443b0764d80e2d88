"""How our part gets into the script's process, and that nobody else notices."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.preflight.plan import ChildConfig, Placement
from torchmem.preflight.run import STARTUP


def python(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (STARTUP, *folders)))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_process_without_torch_imports_nothing_of_ours() -> None:
    """A script's helper process pays for the hook alone."""
    done = python("import sys; print([m for m in sys.modules if m.startswith('torchmem')])")
    loaded = [
        "torchmem",
        "torchmem.preflight",
        "torchmem.preflight.child",
        "torchmem.preflight.child.hook",
    ]
    assert (done.stderr, done.stdout) == ("", f"{loaded}\n")


def test_the_environments_own_startup_file_runs(tmp_path: Path) -> None:
    """A sitecustomize.py that ours hides does its work all the same."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    done = python("print('script')", tmp_path)
    assert (done.stderr, done.stdout) == ("", "theirs\nscript\n")


def test_importing_torch_looks_as_always(tmp_path: Path) -> None:
    """Without orders the import of torch leaves no trace: its loader is its own, its attributes are there."""
    (tmp_path / "torch.py").write_text("VALUE = 3\n")
    code = "import sys, torch; print(torch.VALUE, type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)"
    done = python(code + "; print('torchmem.sdk' in sys.modules)", tmp_path)
    assert (done.stderr, done.stdout) == ("", "3 SourceFileLoader SourceFileLoader\nFalse\n")


@pytest.mark.parametrize("placement", [None, Placement(3, 16, 8)])
def test_orders_arrive_as_given(placement: Placement | None, tmp_path: Path) -> None:
    """What the parent writes into the environment the child reads back."""
    orders = ChildConfig(tmp_path, 7, placement)
    assert ChildConfig.from_environment(orders.environment()) == orders
    assert ChildConfig.from_environment({}) is None


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch"
)
def test_a_script_may_be_instrumented_before_it_imports_torch(tmp_path: Path) -> None:
    """The script's own `instrument()`, which imports torch, gets the session that the preflight opens meanwhile."""
    code = (
        "from torchmem import sdk; session = sdk.instrument(); import torch\n"
        "print(type(session._backend).__name__, session is sdk.instrument(), session.after_step.__name__)"
    )
    done = python(code, **ChildConfig(tmp_path, 7).environment())
    assert (done.stderr, done.stdout) == ("", "WatchedBackend True step_called\n")
