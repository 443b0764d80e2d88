"""deploy/stack.sh reports what is missing before it starts anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def stack(root: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return exit code and stderr of the script."""
    command = [str(root / "deploy" / "stack.sh"), *arguments]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **environment}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_an_unknown_option_is_refused(root: Path) -> None:
    """An unknown option is answered with the known ones."""
    expected = "Unknown option --dmeo: run deploy/stack.sh or deploy/stack.sh --demo.\n"
    assert (2, expected) == stack(root, "--dmeo")


def test_a_missing_prometheus_is_named(root: Path, tmp_path: Path) -> None:
    """Without Prometheus, the script prints the command that installs it."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    (tmp_path / "bash").symlink_to("/bin/bash")
    expected = "prometheus is not on PATH: run sudo apt-get install prometheus.\n"
    assert (2, expected) == stack(root, PATH=str(tmp_path))


@pytest.mark.stack
def test_a_missing_torchmem_is_named(root: Path) -> None:
    """Without torchmem, the script prints how to install it; TORCHMEM overrides the command."""
    expected = (
        "/nowhere/torchmem is not on PATH: run pip install 'torchmem[exporter]', "
        "or set TORCHMEM to the command.\n"
    )
    assert (2, expected) == stack(root, TORCHMEM="/nowhere/torchmem")
