"""The examples of memory tests in CI are valid, and use options that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "memory_tests"
GITHUB, GITLAB = FOLDER / "github-workflow.yml", FOLDER / "gitlab-ci.yml"
JOB_KEYWORDS = {"image", "rules", "script", "after_script", "artifacts"}
"""Of those in GitLab's reference of .gitlab-ci.yml."""


def test_the_linter_of_workflows_finds_nothing(tmp_path: Path) -> None:
    """The GitHub workflow is valid at the place where users copy it."""
    linter = shutil.which("jactionlint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("jactionlint has no package for this platform")
    copy = tmp_path / ".github" / "workflows" / "gpu-memory.yml"
    copy.parent.mkdir(parents=True)
    shutil.copyfile(GITHUB, copy)
    done = subprocess.run(
        [linter, "--shellcheck=", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_gitlab_job_is_valid() -> None:
    """The GitLab file has one job, of keywords that GitLab knows, whose commands are text."""
    ((_, job),) = yaml.safe_load(GITLAB.read_text()).items()
    assert set(job) == JOB_KEYWORDS
    assert all(isinstance(line, str) for line in [*job["script"], *job["after_script"]])
    for command in [*job["script"], *job["after_script"]]:
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    assert set(job["artifacts"]) == {"when", "paths", "reports"}


@pytest.mark.parametrize("path", [GITHUB, GITLAB], ids=lambda path: path.stem)
def test_the_options_exist(path: Path) -> None:
    """Every option of pytest that the examples use is one of the plugin's."""
    command = [sys.executable, "-m", "pytest", "-p", "torchmem.pytest_plugin.plugin", "--help"]
    ini = ["--rootdir", str(path.parent), "-c", "/dev/null", "-p", "no:torchmem"]
    ini += ["-p", "no:cloudcoil"]  # a plugin for clusters, whose requirements are not installed
    known = subprocess.run([*command, *ini], capture_output=True, text=True, check=True).stdout
    used = set(re.findall(r"--gpu-memory[\w-]*", path.read_text()))
    assert used
    assert {option for option in used if f"{option} " not in known.replace("=", " ") + " "} == set()
