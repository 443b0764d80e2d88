"""What the traceback of an OutOfMemoryError says about it, in real processes.

tests/allocator_tier/test_traceback_note.py has the same for PyTorch's own exception.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support import reports

from torchmem.explain.call_stack import Frame
from torchmem.explain.headline import headline
from torchmem.explain.lines import Lines, LineUse
from torchmem.explain.oom_report import OomReport, decode
from torchmem.explain.traceback_note import note_lines
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.sdk.oom.note import TracebackNote

Run = Callable[..., subprocess.CompletedProcess[str]]
Published = Callable[[], list[dict[str, Any]]]

PATH = Path("/run/torchmem/0/1-2-3-1.oom.json")
START = "sdk.instrument(backend=backend); backend.step()\n"
NO_NOTES = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")


def expected(folder: Path) -> list[str]:
    """Return the lines about the only report in a folder."""
    (path,) = folder.rglob(f"*{REPORT_SUFFIX}")
    return [f"torchmem: {line}" for line in note_lines(decode(path.read_bytes()), path)]


def told(text: str) -> list[str]:
    """Return the lines of torchmem's in a text."""
    return [line for line in text.splitlines() if line.startswith("torchmem: ")]


def test_an_uncaught_error_says_why(run_script: Run, tmp_path: Path) -> None:
    """The lines end the traceback; the command in them is about this report."""
    done = run_script(START + "allocator.malloc(2 << 30)")

    *trace, why, command = done.stderr.splitlines()
    assert done.returncode == 1
    assert trace[0] == "Traceback (most recent call last):"
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in trace[-1]
    assert [why, command] == expected(tmp_path)
    match = re.fullmatch(r"torchmem: `torchmem why (\S+)` explains it", command)
    assert match is not None
    assert Path(match[1]).is_file()


def test_the_error_is_the_same(run_script: Run) -> None:
    """Type, arguments, text and traceback are as without torchmem."""
    done = run_script(f"""
def show(kind, error, tb):
    import traceback
    print(kind is type(error), tb is error.__traceback__, error.args == (error.details,))
    print(str(error).splitlines()[-1], "torchmem:" in str(error), len(traceback.extract_tb(tb)))
sys.excepthook = show
{START}allocator.malloc(2 << 30)
""")

    assert done.stdout.splitlines()[0] == "True True True"
    assert done.stdout.splitlines()[1].startswith("CUDA out of memory. ")
    assert done.stdout.splitlines()[1].endswith(" False 2")


def test_a_caught_error_says_nothing(run_script: Run) -> None:
    """Neither one that the script drops, nor one that it shows itself, gets a note."""
    done = run_script(f"""
import traceback
{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError as error: print(traceback.format_exc(), hasattr(error, "__notes__"))
""")

    assert (done.returncode, done.stderr) == (0, "")
    assert "torchmem: " not in done.stdout
    assert done.stdout.endswith(" False\n")


def test_the_setting_switches_it_off(run_script: Run, published: Published) -> None:
    """The traceback is then Python's own, and the report is still written."""
    done = run_script(
        "sdk.instrument(backend=backend, note_on_oom=False); allocator.malloc(2 << 30)"
    )

    assert told(done.stderr) == []
    assert [sample["ended"] for sample in published()] == ["oom"]


def test_a_thread_says_why(run_script: Run, tmp_path: Path) -> None:
    """A thread that dies of it does not end the process, and has a traceback."""
    done = run_script(f"""{START}
thread = threading.Thread(target=allocator.malloc, args=[2 << 30])
thread.start(); thread.join()
""")

    assert done.returncode == 0
    assert done.stderr.startswith("Exception in thread ")
    assert done.stderr.splitlines()[-2:] == expected(tmp_path)


@pytest.mark.parametrize("cause", ["from error", ""])
@NO_NOTES
def test_the_error_in_a_chain_says_why(run_script: Run, tmp_path: Path, cause: str) -> None:
    """Where another exception ends the process, the note is that of the OutOfMemoryError."""
    done = run_script(f"""{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError as error: raise ValueError("training failed") {cause}
""")

    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: training failed"
    assert told(done.stderr) == expected(tmp_path)
    assert "OutOfMemoryError: " in lines[lines.index(expected(tmp_path)[0]) - 1]


@NO_NOTES
def test_of_two_errors_the_last_one_says_why(run_script: Run) -> None:
    """One that occurred while another one was handled is that of the newest report."""
    done = run_script(f"""{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError: allocator.malloc(3 << 30)
""")

    assert len(told(done.stderr)) == 2
    assert "2.00 GiB more" in told(done.stderr)[0]
    assert told(done.stderr) == done.stderr.splitlines()[-2:]


def test_a_librarys_oom_says_why(run_script: Run, tmp_path: Path) -> None:
    """The exception of a library that got no memory from the driver gets the lines, too."""
    done = run_script(START + "raise RuntimeError('CUDA error: out of memory')")

    assert done.stderr.splitlines()[-2:] == expected(tmp_path)


def test_other_errors_say_nothing(run_script: Run) -> None:
    """An error after an OOM from which it does not come has Python's own traceback."""
    done = run_script(f"""{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError: pass
raise KeyError("key")
""")

    assert told(done.stderr) == []


@NO_NOTES
@pytest.mark.parametrize("moment", ["before", "after"])
def test_other_tools_hooks_see_the_note(run_script: Run, tmp_path: Path, moment: str) -> None:
    """An error tracker that replaces the hook, or wraps it, is called with the note."""
    start = f"{START}ours = sys.excepthook\n"
    hook = """
def tracker(kind, error, tb):
    if sys.excepthook is tracker: before(kind, error, tb)
    print(*error.__notes__)
before, sys.excepthook = sys.excepthook, tracker
"""
    alone = "sys.excepthook = lambda kind, error, tb: print(*error.__notes__)\n"
    script = alone + start if moment == "before" else start + hook
    done = run_script(script + "allocator.malloc(2 << 30)")

    assert done.stdout.splitlines() == expected(tmp_path)
    assert told(done.stderr) == ([] if moment == "before" else expected(tmp_path))


def test_below_a_hook_that_replaces_ours(run_script: Run, tmp_path: Path) -> None:
    """If a hook that was set later calls no other, the lines follow its traceback."""
    done = run_script(
        f"{START}sys.excepthook = lambda *_: print('own hook')\nallocator.malloc(2 << 30)"
    )

    assert done.stdout == "own hook\n"
    assert done.stderr.splitlines() == expected(tmp_path)


@NO_NOTES
def test_the_error_in_a_group_says_why(run_script: Run, tmp_path: Path) -> None:
    """Of the tasks of a group that failed, the one that ran out of memory has the note."""
    done = run_script(f"""{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError as error: oom = error
raise ExceptionGroup("tasks", [ValueError("other"), ExceptionGroup("more", [oom])])
""")

    lines = [line.strip(" |") for line in done.stderr.splitlines()]
    assert [line for line in lines if line.startswith("torchmem: ")] == expected(tmp_path)


@NO_NOTES
def test_notes_of_the_script_are_kept(run_script: Run, tmp_path: Path) -> None:
    """Ours is the last one."""
    done = run_script(f"""{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError as error:
    error.add_note("batch 7")
    raise
""")

    assert done.stderr.splitlines()[-3:] == ["batch 7", *expected(tmp_path)]


@pytest.mark.parametrize("notes", ["7", "()", "[object()]", "Broken()"])
def test_odd_notes_do_no_harm(run_script: Run, published: Published, notes: str) -> None:
    """Whatever an exception has for notes, its own traceback is written, and it ends as an OOM."""
    done = run_script(f"""
class Broken:
    def __iter__(self): raise ValueError("broken")
{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError as error:
    error.__notes__ = {notes}
    raise
""")

    assert done.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory." in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert [sample["ended"] for sample in published()] == ["oom"]


def test_an_error_of_ours_hides_nothing(run_script: Run, published: Published) -> None:
    """If the lines cannot be made, the traceback is Python's own."""
    done = run_script("""
session = sdk.instrument(backend=backend); backend.step()
session.lifetime.context.uncaught.explain(lambda: 1 / 0)
allocator.malloc(2 << 30)
""")

    # The background thread may log ours before Python has written the traceback.
    (ours,) = told(done.stderr)
    *_, last = (line for line in done.stderr.splitlines() if line != ours)
    assert done.returncode == 1
    assert ours.startswith("torchmem: exit failed and was skipped")
    assert "OutOfMemoryError: CUDA out of memory." in last
    assert done.stderr.count("Traceback") == 1
    assert set(published()[0]["cost"]["errors"]) == {"exit"}


@NO_NOTES
def test_the_end_of_a_session_says_why(run_script: Run, tmp_path: Path) -> None:
    """The error that leaves the block of a session has the note once."""
    done = run_script(
        "with sdk.instrument(backend=backend): backend.step(); allocator.malloc(2 << 30)"
    )

    assert told(done.stderr) == expected(tmp_path)


def test_an_exit_says_nothing(run_script: Run) -> None:
    """A script that shows the error in its own way and exits is left alone."""
    done = run_script(f"""{START}
try: allocator.malloc(2 << 30)
except OutOfMemoryError: sys.exit("reduce the batch")
""")

    assert (done.returncode, done.stderr) == (1, "reduce the batch\n")


def test_without_notes_the_lines_follow(capsys: pytest.CaptureFixture[str]) -> None:
    """On Python 3.10 they are written below the traceback, once, and the exception is unchanged."""
    error = RuntimeError("CUDA out of memory.")
    note = TracebackNote(lambda: ["a leak", "train.py:7"], has_notes=False)

    assert note.add_to(error)
    assert capsys.readouterr().err == ""
    note.write_below()
    note.write_below()
    assert capsys.readouterr().err == "torchmem: a leak\ntorchmem: train.py:7\n"
    assert not hasattr(error, "__notes__")


@NO_NOTES
def test_a_note_is_added_once() -> None:
    """An exception that ended a thread and then ends the process has one."""
    error = RuntimeError("CUDA out of memory.")
    note = TracebackNote(lambda: ["a leak"], has_notes=True)

    assert note.add_to(error)
    assert note.add_to(error)
    assert error.__notes__ == ["torchmem: a leak"]  # type: ignore[attr-defined]


def held(report: OomReport, *uses: LineUse) -> OomReport:
    """Return the report with lines that hold memory, of which none is known to have grown."""
    return replace(report, lines=Lines(uses, 0, 0))


LINE = LineUse(Frame("/home/ann/gpt/train.py", 66, "log"), 31 << 30, 412)
OF_TORCH = LineUse(Frame("/v/torch/nn/linear.py", 3, "forward", "torch"), 40 << 30, 412)


def test_the_line_that_holds_the_memory() -> None:
    """The program's own line with the most memory is the second line, with its share."""
    report = held(reports.CAPACITY, OF_TORCH, LINE)
    assert note_lines(report, PATH) == (
        headline(report),
        "31.00 GiB (40%) of the tensors was allocated at train.py:66 in log",
        f"`torchmem why {PATH}` explains it",
    )


@pytest.mark.parametrize(
    "report",
    [
        reports.CAPACITY,
        held(reports.CAPACITY, OF_TORCH),
        held(reports.CAPACITY, replace(LINE, bytes=1 << 30)),
        reports.LEAK_WITH_LINES,
    ],
)
def test_no_line_is_named_that_explains_nothing(report: OomReport) -> None:
    """None without a recording, none of PyTorch or with little memory, and none named already."""
    assert note_lines(report, PATH) == (headline(report), f"`torchmem why {PATH}` explains it")


def test_the_path_is_quoted() -> None:
    """A shell reads the command as it is written."""
    path = Path("/scratch/my run/0/1.oom.json")
    command = note_lines(reports.CAPACITY, path)[-1].split("`")[1]

    assert shlex.split(command) == ["torchmem", "why", str(path)]


@given(reports.reports)
def test_every_report_has_three_lines_at_most(report: OomReport) -> None:
    """Whatever a report holds, each line is one line of printable text."""
    lines = note_lines(report, PATH)

    assert 2 <= len(lines) <= 3
    assert all(line.isprintable() for line in lines)
