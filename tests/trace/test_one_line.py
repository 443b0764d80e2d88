"""OOM reports, recorded history, snapshots and preflights name the same line of a stack."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.snapshot import FrameInfo
from torchmem.explain.call_stack import CallStack, Frame, package_of
from torchmem.explain.lines import line_of
from torchmem.preflight.child.uses import SourceLines
from torchmem.trace.frames import call_stack
from torchmem.trace.stacks import SnapshotFrame

SITE = "/venv/lib/python3.12/site-packages"
FILES = {
    "own": "/job/train.py",
    "helper": "/job/log.py",
    "torch": f"{SITE}/torch/nn/modules/linear.py",
    "source build": "/opt/pytorch/torch/nn/modules/linear.py",
    "shortened": "torch/nn/modules/linear.py",
    "compiled": "/tmp/torchinductor_ann/ab/cab.py",  # noqa: S108
    "graph": "<eval_with_key>.7",
    "python": "/usr/lib/python3.12/contextlib.py",
    "model": f"{SITE}/transformers/models/llama/modeling_llama.py",
}
STACKS = st.lists(
    st.builds(
        FrameInfo,
        filename=st.sampled_from(sorted(FILES.values())),
        line=st.integers(1, 999),
        name=st.sampled_from(["forward", "log", "<module>", "__call__"]),
    ),
    min_size=1,
    max_size=8,
)


def of_oom(frames: list[FrameInfo]) -> Frame | None:
    """Return the line as an OOM report names it, whose frames come from the running program."""
    return CallStack(
        tuple(
            Frame(each["filename"], each["line"], each["name"], package_of(each["filename"]))
            for each in frames
        )
    ).line


@given(STACKS)
def test_one_stack_has_one_line(frames: list[FrameInfo]) -> None:
    """Whatever is recorded of a stack, every reader names the same file and line of it."""
    recorded = [SnapshotFrame(each["filename"], each["line"], each["name"]) for each in frames]
    line = of_oom(frames)
    assert line is not None
    assert line_of(frames) == line
    assert call_stack(recorded).line == line
    named = SourceLines(Path("/job")).of(frames)
    assert named is not None
    assert line.file.endswith(named.file)
    assert (named.line, named.function) == (line.line, line.function)


@given(STACKS)
def test_it_is_the_innermost_of_the_program(frames: list[FrameInfo]) -> None:
    """If a frame is the user's own, the line is the innermost such frame."""
    own = [each for each in frames if each["filename"].startswith("/job/")]
    line = of_oom(frames)
    assert line is not None
    assert not own or (line.file, line.line) == (own[0]["filename"], own[0]["line"])


def test_native_frames_are_passed_over() -> None:
    """Frames of C++, which a snapshot may hold, are never the line."""
    frames = [
        FrameInfo(filename="??", line=0, name="c10::cuda::malloc"),
        FrameInfo(filename="/pytorch/aten/src/Copy.cu", line=9, name="copy_kernel"),
        FrameInfo(filename="/job/train.py", line=66, name="main"),
    ]
    assert line_of(frames) == Frame("/job/train.py", 66, "main")
