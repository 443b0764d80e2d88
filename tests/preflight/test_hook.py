"""The hook that starts measuring inside the script's process, unnoticed by the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.phantom.environment import STARTUP
from torchmem.preflight.plan import ChildConfig, Placement
from torchmem.preflight.run import HOOK


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (STARTUP, *folders)))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": path, "PHANTOM_HOOK": HOOK},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_without_torch_loads_only_the_hook() -> None:
    """A helper process of the script loads nothing else of torchmem."""
    done = python("import sys; print([m for m in sys.modules if m.startswith('torchmem')])")
    loaded = [
        "torchmem",
        "torchmem.preflight",
        "torchmem.preflight.child",
        "torchmem.startup",
        "torchmem.startup.torch_import",
        "torchmem.preflight.child.hook",
    ]
    assert (done.stderr, done.stdout) == ("", f"{loaded}\n")


def test_the_environments_own_sitecustomize_runs(tmp_path: Path) -> None:
    """A sitecustomize.py that is hidden by that of the preflight runs all the same."""
    (tmp_path / "sitecustomize.py").write_text("print('environment')\n")
    done = python("print('script')", tmp_path)
    assert (done.stderr, done.stdout) == ("", "environment\nscript\n")


def test_an_import_of_torch_is_unchanged(tmp_path: Path) -> None:
    """Without a configuration, the import of torch leaves no trace of the hook."""
    (tmp_path / "torch.py").write_text("VALUE = 3\n")
    code = """
import sys, torch
print(torch.VALUE, type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)
print('torchmem.sdk' in sys.modules)
"""
    done = python(code, tmp_path)
    assert (done.stderr, done.stdout) == ("", "3 SourceFileLoader SourceFileLoader\nFalse\n")


@pytest.mark.parametrize("placement", [None, Placement(3, 16, 8)])
def test_the_configuration_survives_the_environment(
    placement: Placement | None, tmp_path: Path
) -> None:
    """The child reads the configuration that the parent wrote."""
    config = ChildConfig(tmp_path, 7, placement)
    assert ChildConfig.from_environment(config.to_environment()) == config
    assert ChildConfig.from_environment({}) is None
