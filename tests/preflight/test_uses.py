"""What was allocated at the peak of a trace, by component, module and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import MIB
from torchmem.compare.peak_memory import SourceLine, Use
from torchmem.preflight.child.uses import (
    SourceLines,
    Trace,
    TraceMark,
    repository,
    trace_peak,
    uses_left,
    with_rounding,
)

FORWARD: Any = [{"filename": "/job/model.py", "line": 2, "name": "forward"}]
STEP: Any = [{"filename": "/job/train.py", "line": 9, "name": "train"}]
LINE = SourceLine("model.py", 2, "forward")
CALL = SourceLine("train.py", 9, "train")


def alloc(address: int, size: int, frames: Any = ()) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address: int, size: int) -> dict[str, Any]:
    return {"action": "free_requested", "addr": address, "size": size}


EVENTS = [
    alloc(1, 10 * MIB, STEP),  # a parameter
    {"action": "segment_alloc", "addr": 1, "size": 20 * MIB},
    alloc(2, 5 * MIB, FORWARD),  # of an earlier step, and never freed
    alloc(3, 20 * MIB, FORWARD),
    alloc(4, 8 * MIB),  # in the backward pass: a gradient
    alloc(5, 4 * MIB),
    free(5, 4 * MIB),
    {"action": "free_completed", "addr": 5, "size": 4 * MIB},
    free(3, 20 * MIB),
]
MOMENTS = [
    TraceMark({0: 1}, "forward", owners={0: {1: ("parameters", "up")}}),
    TraceMark({0: 2}, begins_step=True),
    TraceMark({0: 3}, "backward", frames=STEP),
    TraceMark({0: 6}, "forward", owners={0: {4: ("gradients", "up")}}),
]
TRACE = Trace(EVENTS, MOMENTS, start=0, end=7, since=0)
LINES = SourceLines(Path("/job"))


def test_the_peak_is_divided() -> None:
    """Owners, phases and steps give the component; the thread of backward gets its call's line."""
    peak = trace_peak(TRACE, 0, lambda frames: "layers.*", LINES)
    assert peak is not None
    assert peak.rounded == 47 * MIB
    assert set(peak.uses) == {
        Use("parameters", 10 * MIB, "up", CALL),
        Use("gradients", 8 * MIB, "up", CALL),
        Use("activations", 20 * MIB, "layers.*", LINE),
        Use("temporaries", 4 * MIB, "layers.*", CALL),
        Use("held", 5 * MIB, "layers.*", LINE),
    }


def test_a_trace_with_gaps_is_not_divided() -> None:
    """If PyTorch counted other events than it recorded, nothing is claimed."""
    assert trace_peak(Trace(EVENTS, MOMENTS, 0, 8, 0), 0, lambda frames: None, LINES) is None


def test_a_later_part() -> None:
    """The peak of a block counts from its beginning; what is left is what it allocated itself."""
    later = Trace(EVENTS, MOMENTS, 0, 7, since=7)
    peak = trace_peak(later, 0, lambda frames: None, LINES)
    assert peak is not None
    assert peak.rounded == 23 * MIB
    left = uses_left(Trace(EVENTS, MOMENTS, 0, 7, since=3), 0, lambda frames: None, LINES)
    assert left == (Use("gradients", 8 * MIB, "up", CALL),)


def test_what_is_freed_by_clearing_is_a_workspace() -> None:
    """What PyTorch frees when cuBLAS's workspaces are cleared was one, wherever it was made."""
    events = [alloc(1, MIB, FORWARD), alloc(2, MIB, FORWARD), free(2, MIB)]
    marks = [TraceMark({0: 2}, frees=("workspaces", None)), TraceMark({0: 3})]
    peak = trace_peak(Trace(events, marks, 0, 3, 0), 0, lambda frames: None, LINES)
    assert peak is not None
    assert set(peak.uses) == {
        Use("activations", MIB, None, LINE),
        Use("workspaces", MIB, None, LINE),
    }


def test_rounding_completes_the_peak() -> None:
    """The uses and the rounding add up to the peak, or there are none."""
    uses = (Use("activations", 10),)
    assert with_rounding(uses, 512) == (Use("activations", 10), Use("rounding", 502))
    assert with_rounding(uses, 5) == ()
    assert with_rounding((), 512) == ()


def test_paths_are_the_same_on_every_machine() -> None:
    """Lines of packages start with the package, and are named if no line is the user's own."""
    package = "/venv/lib/python3.11/site-packages/transformers/llama.py"
    frames: Any = [
        {
            "filename": "/venv/lib/python3.11/site-packages/torch/nn/linear.py",
            "line": 1,
            "name": "forward",
        },
        {"filename": package, "line": 7, "name": "rotate"},
        {"filename": package, "line": 5, "name": "forward"},
        *STEP,
    ]
    assert LINES.of(frames) == CALL
    assert LINES.of(frames[:3]) == SourceLine("transformers/llama.py", 7, "rotate")
    assert LINES.of([]) is None


def test_the_repository(tmp_path: Path) -> None:
    """Paths are relative to the folder with pyproject.toml or .git, else to the current one."""
    inner = tmp_path / "src" / "package"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert repository(inner) == tmp_path
