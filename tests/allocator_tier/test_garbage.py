"""Tensors in reference cycles on PyTorch's real allocator: garbage, and what only looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.phantom import run_on_phantom

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport, decode
from torchmem.explain.remedies import remedies
from torchmem.sample.run_directory import REPORT_SUFFIX

pytestmark = pytest.mark.allocator

MIB = 1 << 20
# With this threshold the objects of the background thread do not make a collection due.
PRELUDE = """
import gc, sys, torch; gc.set_threshold(100_000)
from torchmem import sdk
session = sdk.instrument(interval=0.02)
def take(mib): return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
class Node:
    def __init__(self):
        self.me = self
        self.data = take(400)
"""
CYCLES = """
def train():
    for _ in range(100): Node()
train()
"""
STEPS = """
def train():
    for _ in range(100): Node(); session.step()
train()
"""
EXCEPTIONS = """
kept = None
def fail():
    data = take(300)
    try: raise ValueError("no")
    except ValueError as error: failure = error
while True: fail()
"""
MODULES = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(take(300).float()[: 300 << 18])
        self.hook = lambda: self.weight
while True: Model()
"""
LISTS = """
while True: cycle = [take(300)]; cycle.append(cycle)
"""
LEAK = """
kept = []
while True: kept.append(take(300)); session.step()
"""
LEAK_AND_CYCLES = """
kept = []
Node()
while True: kept.append(take(300)); session.step()
"""
GRAPHS = """
parameter, total = torch.nn.Parameter(take(100).float()), 0
while True: total = total + (parameter * parameter).exp().sum(); session.step()
"""


def _report(
    tmp_path: Path, script: str, memory: str = "4GiB", **environment: str
) -> tuple[OomReport, str]:
    environment |= {"TORCHMEM_RUN_DIR": str(tmp_path)}
    done = run_on_phantom(
        "-c", PRELUDE + script, memory=memory, environment=environment, state=tmp_path / "phantom"
    )
    assert done.stderr.count("\nTraceback") == 1, done.stderr
    (path,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")
    return decode(path.read_bytes()), done.stderr


@pytest.mark.parametrize("script", [CYCLES, STEPS], ids=["no_steps", "steps"])
def test_objects_that_refer_to_themselves(tmp_path: Path, script: str) -> None:
    """A class whose instance owns 400 MiB and points to itself, a hundred times: all is named."""
    report, _ = _report(tmp_path, script, memory="11GiB")

    assert report.device.allocator is not None
    assert report.oom.onset == "garbage"
    assert report.garbage is not None
    assert report.garbage.bytes == report.device.allocator.allocated_bytes.total == 26 * 400 * MIB
    assert headline(report) == (
        "Garbage: 10.16 GiB of tensors was in reference cycles that Python's collector had not "
        "reached (26 × Node)"
    )
    assert "cycle of Node" in remedies(report)[0].text


def test_exceptions_that_keep_their_frames(tmp_path: Path) -> None:
    """The type of the exceptions is named, and the advice is about exceptions."""
    report, _ = _report(tmp_path, EXCEPTIONS)

    assert report.oom.onset == "garbage"
    assert report.garbage is not None
    (kind,) = report.garbage.types
    assert (kind.name, kind.is_exception) == ("ValueError", True)
    assert "exceptions" in remedies(report)[0].text


@pytest.mark.parametrize(("script", "name"), [(MODULES, "Model"), (LISTS, "list")])
def test_the_type_that_says_most(tmp_path: Path, script: str, name: str) -> None:
    """Of what keeps a tensor, the script's own type is named; a container only if there is none."""
    report, _ = _report(tmp_path, script)

    assert report.garbage is not None
    assert [kind.name for kind in report.garbage.types] == [name]


def test_the_line_that_allocates_is_named(tmp_path: Path) -> None:
    """With recorded stacks, the line that allocated the garbage is known."""
    report, _ = _report(tmp_path, CYCLES, TORCHMEM_HISTORY="true")

    assert report.garbage is not None
    assert report.garbage.line is not None
    assert report.garbage.line.function == "take"
    assert headline(report).endswith("allocated at <string>:5 in take")


@pytest.mark.parametrize("script", [LEAK, GRAPHS], ids=["list", "graphs"])
def test_a_leak_is_no_garbage(tmp_path: Path, script: str) -> None:
    """What a full collection does not free is no garbage: a list that grows, graphs of losses."""
    report, _ = _report(tmp_path, script)

    assert report.garbage is None
    assert report.oom.onset != "garbage"


def test_garbage_beside_a_larger_leak_is_a_remark(tmp_path: Path) -> None:
    """A leak of 3 GiB is the reason, not 400 MiB of garbage that would have been room for one."""
    report, _ = _report(tmp_path, f"gc.disable()\n{LEAK_AND_CYCLES}")

    assert report.garbage is not None
    assert report.garbage.bytes == 400 * MIB
    assert report.oom.onset != "garbage"


def test_a_collector_that_is_off(tmp_path: Path) -> None:
    """A script that has switched the collector off is told so, and its setting is kept."""
    at_exit = "lambda: print(gc.isenabled(), file=sys.stderr)"
    script = f"import atexit; gc.disable(); atexit.register({at_exit})"
    report, errors = _report(tmp_path, script + CYCLES)

    assert report.garbage is not None
    assert report.garbage.is_collector_off
    assert any("switched off" in remedy.text for remedy in remedies(report))
    assert errors.endswith("False\n")


def test_frozen_objects_are_left_alone(tmp_path: Path) -> None:
    """What `gc.freeze` has taken from the collector is not what a collection frees."""
    script = "gc.disable()\nNode(); gc.freeze(); gc.enable()"
    report, _ = _report(tmp_path, f"{script}\nkept = take(3400)")

    assert report.garbage is None


NOTEBOOK = """
import traceback
def forward(batch):
    hidden = [take(400) for _ in range(6)]
    raise ValueError("no")
try: forward(take(200))
except ValueError as error: sys.last_traceback = error.__traceback__
live = take(700)
try: take(1000)
except torch.OutOfMemoryError: pass
"""


def test_the_traceback_of_the_last_error(tmp_path: Path) -> None:
    """What `sys.last_traceback` keeps, as in a notebook, is said, and how to let go of it."""
    environment = {"TORCHMEM_RUN_DIR": str(tmp_path)}
    state = tmp_path / "phantom"
    run_on_phantom("-c", PRELUDE + NOTEBOOK, memory="4GiB", environment=environment, state=state)
    (path,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")
    report = decode(path.read_bytes())

    assert report.last_error_bytes == 2600 * MIB
    assert "sys.last_traceback = " in remedies(report)[0].lines[0]


def test_the_setting_switches_it_off(tmp_path: Path) -> None:
    """Without `collect_on_oom` nothing of the script is collected at its end."""
    script = "import weakref\nfinalized = weakref.finalize(sys, print)"
    report, _ = _report(tmp_path, script + CYCLES, TORCHMEM_COLLECT_ON_OOM="0")

    assert report.garbage is None
