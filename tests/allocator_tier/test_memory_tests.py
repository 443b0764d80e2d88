"""The pytest plugin on PyTorch's real allocator: limits, failures, baselines, xdist, examples."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "memory_tests"
PLUGIN = ("-p", "torchmem.pytest_plugin.plugin", "--gpu-memory")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest: its output, and by test what failed."""

    output: str
    failures: dict[str, str]
    baseline: Path


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder, without the settings of this repository."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:torchmem -p no:cacheprovider\n")
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", *PLUGIN, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All tests, run once, with a baseline saved and a table."""
    folder = tmp_path_factory.mktemp("memory-tests")
    shutil.copyfile(HERE / "memory_tests.py", folder / "test_it.py")
    baseline = folder / "gpu-memory.json"
    options = ("--gpu-memory-report", "--gpu-memory-gpu-model", "a100-40gb")
    done = run(folder, *options, "--gpu-memory-save-baseline", str(baseline))
    parts = re.split(r"\n_{3,} (test_\w+) _{3,}\n", done.stdout)
    return Run(done.stdout, dict(zip(parts[1::2], parts[2::2], strict=True)), baseline)


def test_what_fails_and_what_passes(first: Run) -> None:
    """Only the tests that are too large, read values, or end early fail."""
    assert sorted(first.failures) == [
        "test_fails_above_its_limit",
        "test_fails_because_of_values",
        "test_fails_by_an_early_exit",
        "test_fails_killed",
        "test_fails_missing_on_the_phantom",
        "test_fails_with_a_leak",
        "test_fails_without_its_descriptors",
    ], first.output
    assert "7 failed, 8 passed" in first.output


def test_a_failure_says_why(first: Run) -> None:
    """A failure has the peak, its limit, and what held the memory, down to the line."""
    text = first.failures["test_fails_above_its_limit"]
    assert re.search(r"peak allocated [\d.]+ MiB, limit 30.00 MiB: [\d.]+ MiB too much\.", text)
    assert "on a phantom NVIDIA A100-SXM4-40GB with PyTorch" in text
    assert re.search(
        r"MiB  optimizer state +layers\.\*\.up +test_it\.py:\d+  optimizer\.step", text
    )
    assert re.search(r"MiB  activations +layers\.\* +test_it\.py:\d+  return x \+ self\.down", text)


def test_a_leak_is_named(first: Run) -> None:
    """A leak is named by the line that allocated what is left."""
    text = first.failures["test_fails_with_a_leak"]
    assert "leaked 32.00 MiB, limit 1.00 MiB: 31.00 MiB too much." in text
    assert re.search(r"32\.00 MiB .*test_it\.py:\d+  request\.config\.kept = torch\.empty", text)


def test_what_the_phantom_cannot_do_is_said(first: Run) -> None:
    """Values, processes, early ends and tests that depend on the GPU each have a sentence."""
    values = first.failures["test_fails_because_of_values"]
    assert "the test read 1 value from the phantom GPU, which computes nothing" in values
    assert "was killed by SIGKILL" in first.failures["test_fails_killed"]
    assert "run it with --capture=no" in first.failures["test_fails_without_its_descriptors"]
    assert "exited with code 3" in first.failures["test_fails_by_an_early_exit"]
    missing = first.failures["test_fails_missing_on_the_phantom"]
    assert "the test does not exist when it is collected on the phantom GPU" in missing
    assert "test_forks: the test used no GPU memory in its own process, but started 1" in (
        first.output
    )


def test_the_table(first: Run) -> None:
    """The table has a row for each measured test, with its peak and its limit."""
    rows = [line for line in first.output.splitlines() if line.endswith("::test_peak_is_pytorchs")]
    assert len(rows) == 1
    assert re.match(r" *[\d.]+ MiB +1\.00 GiB +[\d.]+ MiB +\w", rows[0])


def test_closed_descriptors_are_no_problem_without_capture(tmp_path: Path) -> None:
    """A test that closes what it inherited passes where pytest does not need it, as do others."""
    shutil.copyfile(HERE / "memory_tests.py", tmp_path / "test_it.py")
    done = run(tmp_path, "--capture=no", "-k", "without_its_descriptors or test_forks")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_examples_pass(tmp_path: Path) -> None:
    """The examples of the documentation pass without a GPU, as one rank of FSDP2, too."""
    pytest.importorskip("transformers")
    shutil.copyfile(EXAMPLES / "test_memory.py", tmp_path / "test_example.py")
    done = run(tmp_path, "--gpu-memory-report")
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"MiB +800\.00 MiB .*::test_fsdp2_rank", done.stdout)


def test_a_baseline_finds_growth(first: Run) -> None:
    """With xdist, a test that needs more than its baseline fails with what changed."""
    folder = first.baseline.parent
    entries = json.loads(first.baseline.read_text())["entries"]
    assert "test_it.py::test_peak_is_pytorchs" in entries
    chosen = ("-n", "1", "test_it.py", "-k", "pytorchs or varies")
    page = folder / "comment.md"
    options = ("--gpu-memory-baseline", first.baseline.name, "--gpu-memory-markdown", str(page))
    done = run(folder, *options, "--gpu-memory-gpu-model", "a100-40gb", *chosen, ROWS="2048")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"\+[\d.]+ MiB activations in layers\.\* \(test_it\.py:\d+\)\.", done.stdout)
    assert "What changed, by component, module and line:" in done.stdout
    assert "🔴 more | <code>test&#95;it.py::test&#95;peak" in page.read_text()


def test_variation_is_said(first: Run) -> None:
    """A peak that differs between two runs of the same test is said to vary, and by how much."""
    assert re.search(r"test_varies: peak allocated varies by [\d.]+ MiB \([\d.]+%\)", first.output)


def test_beside_a_gpu_it_measures_there(tmp_path: Path) -> None:
    """In a process that has a GPU, tests run in it, one after the other, with the same results."""
    shutil.copyfile(HERE / "memory_tests.py", tmp_path / "test_it.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:torchmem\n")
    chosen = "pytorchs or own or resets or limit"
    arguments = ["-q", *PLUGIN, "--gpu-memory-report", "-k", chosen, "-p", "no:cacheprovider"]
    script = f"import pytest; raise SystemExit(pytest.main({arguments!r}))"
    places = {"PHANTOM_STATE_DIR": str(tmp_path / "phantom")}
    done = run_on_phantom("-c", script, memory="16GiB", environment=places, folder=tmp_path)
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"MiB +test_it\.py::test_fails_above|0 +test_it\.py::test_fails", done.stdout)


def test_without_a_compiler(tmp_path: Path) -> None:
    """Without a C compiler, each measured test fails with what to install."""
    shutil.copyfile(HERE / "memory_tests.py", tmp_path / "test_it.py")
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = run(tmp_path, "-k", "fails_killed", CC="/no/cc", **places)
    assert "CC=/no/cc is not a program: apt install gcc libc6-dev" in done.stdout
