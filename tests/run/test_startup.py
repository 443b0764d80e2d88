"""How a Python process of a job starts: as without torchmem, even if torchmem is broken."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.plain_and_hooked import SOURCES, pythons

from torchmem.phantom.environment import STARTUP as PHANTOM
from torchmem.preflight.run import HOOK
from torchmem.run.launch import STARTUP as RUN

OWN = "VALUE = 7\nprint('own')\n"
LOOK = """
import sys
for name in ("sitecustomize", "usercustomize"):
    try:
        print(__import__(name).VALUE)
    except ImportError as error:
        print(error)
print(sys.path)
for names in (sys.path_importer_cache, sys.modules):
    print(*sorted(name for name in names if "torchmem" not in name and name != "__future__"))
"""
# Ways in which a torchmem, or what it imports, may be broken.
BROKEN = ("x = = 1", "raise ValueError", "import nothing_of_this", "def install(): 1 / 0", "\0")
STARTUPS = pytest.mark.parametrize("startup", [RUN, PHANTOM], ids=["run", "preflight"])


def python(
    *folders: Path, code: str = LOOK, python: str = pythons()[0], hooked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run code with `folders` on PYTHONPATH."""
    switch = {"TORCHMEM": "1", "PHANTOM_HOOK": HOOK} if hooked else {}
    return subprocess.run(
        [python, "-B", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))} | switch,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def same(startup: Path, own: Path, interpreter: str) -> None:
    """Assert that a Python starts with `startup` as it does without."""
    plain = python(own, *SOURCES, python=interpreter, hooked=False)
    hooked = python(startup, own, *SOURCES, python=interpreter)
    assert (plain.returncode, plain.stdout) == (hooked.returncode, hooked.stdout)
    assert plain.stderr == hooked.stderr


def broken_torchmem(folder: Path, content: str) -> Path:
    """Write a torchmem of which each module has that content."""
    for name in ("run/autostart", "preflight/child/hook"):
        path = folder / f"torchmem/{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    return folder


@pytest.mark.parametrize(
    ("startup", "interpreter"),
    [(PHANTOM, pythons()[0]), *((RUN, python) for python in pythons())],
)
@pytest.mark.parametrize("own", ["", OWN, "import nothing_of_this", "raise ValueError", "1 = 2"])
def test_a_python_starts_the_same(
    startup: Path, own: str, interpreter: str, tmp_path: Path
) -> None:
    """With and without a sitecustomize of its own, even a broken one, it prints the same."""
    if own:
        (tmp_path / "sitecustomize.py").write_text(own)
    same(startup, tmp_path, interpreter)


@STARTUPS
@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_torchmem_costs_one_line(startup: Path, content: str, tmp_path: Path) -> None:
    """The environment's own sitecustomize and the program run."""
    (tmp_path / "sitecustomize.py").write_text(OWN)
    done = python(startup, broken_torchmem(tmp_path, content), code="print('program')")
    assert (done.returncode, done.stdout) == (0, "own\nprogram\n")
    assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_torchmem_in_the_environment_costs_one_line(content: str, tmp_path: Path) -> None:
    """The line in site-packages prints one line, even together with `torchmem run`."""
    broken_torchmem(tmp_path, content)
    line = (RUN.parent / "torchmem-autostart.pth").read_text()
    (tmp_path / "torchmem-autostart.pth").write_text(line)
    (tmp_path / "other.pth").write_text("import sys; print('other', flush=True)\n")
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r}); import sitecustomize\nprint('program')"
    )
    (tmp_path / "sitecustomize.py").write_text(OWN)
    for folders in ([tmp_path], [tmp_path, RUN]):
        done = python(*folders, code=code.replace("import sitecustomize", ""))
        assert done.stdout.endswith("other\nprogram\n")
        assert done.stderr.count("\n") == 1
        assert "torchmem: this process is not monitored: " in done.stderr


def test_a_line_for_a_closed_stderr_is_not_printed(tmp_path: Path) -> None:
    """Without stderr, nothing is written to stdout, where print() would write it."""
    broken_torchmem(tmp_path, "raise ValueError")
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "print(1)" 2>&-', pythons()[0]],
        env=os.environ | {"PYTHONPATH": f"{RUN}{os.pathsep}{tmp_path}", "TORCHMEM": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
