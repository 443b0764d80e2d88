"""Python stacks at an OutOfMemoryError: complete, bounded, and without references to frames."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.garbage import no_collection

from torchmem.explain.call_stack import (
    MAX_PLACE_BYTES,
    CallStack,
    Frame,
    Origin,
    package_of,
    public_place,
)
from torchmem.explain.oom_report import decode
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.sample.untrusted import MAX_TEXT
from torchmem.sdk.pytorch.call_stack import (
    MAX_INNER_FRAMES,
    MAX_OUTER_FRAMES,
    backward_node,
    calling_origin,
    calling_stack,
    raising_origin,
)
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

GIB = 1 << 30
HERE = str(Path(__file__))
Opener = Callable[..., Session]


class Held:
    """Something in a local variable."""


def _report_of(folder: Path) -> Origin:
    (path,) = folder.rglob(f"*{REPORT_SUFFIX}")
    origin = decode(path.read_bytes()).origin
    assert origin is not None
    return origin


def test_an_oom_has_the_line_that_asked(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """The report begins with the line that called the allocator, and has the open phase."""
    session = open_session(backend)
    with session.phase("update"), session.phase("rollout"):
        line = sys._getframe().f_lineno + 2
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(2 * GIB)
    origin = _report_of(tmp_path)

    own = origin.own
    assert own is not None
    assert (HERE, line) == (own.file, own.line)
    assert not any("torchmem/sdk/" in frame.file for frame in origin.stack.frames)
    assert (origin.phase, origin.main_stack, origin.thread) == ("rollout", None, None)


def test_a_phase_that_was_left_is_not_named(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """After the end of a phase, an OOM belongs to none."""
    session = open_session(backend)
    with session.phase("rollout"):
        pass
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2 * GIB)

    assert _report_of(tmp_path).phase is None


def test_the_line_is_published(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Callable[[], list[dict[str, Any]]],
) -> None:
    """The sample names file and line without directories."""
    open_session(backend)
    line = sys._getframe().f_lineno + 2
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2 * GIB)
    (device,) = published()[0]["devices"]

    assert device["last_oom"]["line"] == f"test_call_stack.py:{line}"


def test_another_thread_has_both_stacks() -> None:
    """In another thread, its name and the main thread's stack are added."""
    found: list[Origin] = []
    thread = threading.Thread(
        target=lambda: found.append(calling_origin("MmBackward0", None)), name="loader"
    )
    thread.start()
    thread.join()
    (origin,) = found

    assert (origin.thread, origin.backward) == ("loader", "MmBackward0")
    assert "<lambda>" in origin.stack.frames[0].function
    assert origin.main_stack is not None
    assert "test_another_thread_has_both_stacks" in {
        frame.function for frame in origin.main_stack.frames
    }


def test_nothing_stays_alive(
    backend: SimulatedBackend, allocator: DeviceCachingAllocator, open_session: Opener
) -> None:
    """Local variables of the failed call are freed with it, without the garbage collector."""
    open_session(backend)
    kept: list[weakref.ref[Held]] = []

    def fail() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        with contextlib.suppress(OutOfMemoryError):
            allocator.malloc(2 * GIB)

    with no_collection():
        fail()

    assert kept[0]() is None


@given(st.integers(0, 300))
def test_a_stack_is_bounded(depth: int) -> None:
    """Of any stack, the innermost and the outermost frames are kept and the others counted."""

    def descend(left: int) -> CallStack:
        return descend(left - 1) if left else calling_stack()

    flat, deep = descend(0), descend(depth)
    length = len(flat.frames) + flat.omitted + depth

    assert length == len(deep.frames) + deep.omitted
    assert len(deep.frames) == min(length, MAX_INNER_FRAMES + MAX_OUTER_FRAMES)
    assert flat.frames[-1] == deep.frames[-1]
    assert flat.frames[0] == deep.frames[0]


@pytest.mark.parametrize(
    ("file", "module", "package"),
    [
        ("/home/ann/gpt/train.py", "__main__", None),
        ("/src/torchmem/simulator/scenarios/leak.py", "torchmem.simulator.scenarios.leak", None),
        ("/src/torchmem/simulator/gpu.py", "torchmem.simulator.gpu", "torchmem"),
        ("train.py", "__main__", None),
        ("<stdin>", "__main__", None),
        ("/tmp/ipykernel_17/4.py", "__main__", None),  # noqa: S108
        ("/venv/lib/python3.12/site-packages/transformers/trainer.py", "transformers.trainer",
         "transformers"),
        ("/usr/lib/python3/dist-packages/six.py", "six", "six"),
        ("/opt/pytorch/torch/serialization.py", "torch.serialization", "torch"),
        ("/opt/pytorch/torch/nn/modules/linear.py", "", "torch"),
        ("<eval_with_key>.7", "", "torch"),
        ("/tmp/torchinductor_ann/ab/c.py", "torch._inductor.runtime.compile_tasks.c", "torch"),  # noqa: S108
        (os.__file__, "os", "python"),
        ("<frozen runpy>", "runpy", "python"),
        ("/job/torch_tools/nn/train.py", "train", None),
    ],
)  # fmt: skip
def test_packages(file: str, module: str, package: str | None) -> None:
    """PyTorch, Python, and installed packages are told from the user's own code."""
    assert package == package_of(file, module)


def _inner() -> None:
    raise ValueError("inner")


def _traceback() -> TracebackType | None:
    with pytest.raises(ValueError, match="inner") as caught:
        _inner()
    return caught.tb


CARRIED = """Caught RuntimeError in pin memory thread for device 0.
Original Traceback (most recent call last):
  File "/v/lib/python3.12/site-packages/torch/utils/data/_utils/pin_memory.py", line 41, in do
    data = pin_memory(data, device)
  File "/home/ann/data.py", line 7, in collate
    return data.pin_memory(device)
RuntimeError: CUDA error: out of memory
"""


def test_a_traceback_is_a_stack() -> None:
    """The innermost call of a traceback comes first."""
    origin = raising_origin(_traceback(), "ValueError")

    assert [frame.function for frame in origin.stack.frames] == ["_inner", "_traceback"]
    assert origin.main_stack is None


def test_an_error_of_a_data_loader_has_its_own_stack() -> None:
    """The stack in the text of an error that DataLoader carried is the one of the thread."""
    origin = raising_origin(_traceback(), CARRIED)

    assert Frame("/home/ann/data.py", 7, "collate") == origin.own
    assert [frame.package for frame in origin.stack.frames[1:]] == ["torch"]
    assert origin.main_stack is not None


@given(st.text(max_size=400), st.text(max_size=400), st.integers(0, 1 << 40))
def test_a_public_place_is_bounded(file: str, function: str, line: int) -> None:
    """A label has no directory, and is at most as long as its bound."""
    place, name = public_place(Frame(file, line, function))

    assert "/" not in place
    assert max(len(place), len(name)) <= MAX_PLACE_BYTES


@given(st.text(max_size=400))
def test_a_frame_of_any_file(file: str) -> None:
    """The file of a frame is bounded, keeps its end, and can be encoded or is replaced."""
    code = compile("import sys\nframe = stack()", "train.py", "exec").replace(co_filename=file)
    namespace: dict[str, object] = {"stack": calling_stack, "__name__": "__main__"}
    exec(code, namespace)  # noqa: S102 - code of this test
    stack = namespace["frame"]

    assert isinstance(stack, CallStack)
    assert len(stack.frames[0].file.encode()) <= MAX_TEXT
    assert file.endswith(stack.frames[0].file.removeprefix("…"))


@pytest.mark.parametrize(
    ("functions", "name"),
    [
        ({}, None),
        ({"_current_graph_task_id": lambda: -1}, None),
        ({"_current_graph_task_id": lambda: 3}, ""),
        (
            {"_current_graph_task_id": lambda: 3, "_current_autograd_node": lambda: None},
            "",
        ),
        (
            {
                "_current_graph_task_id": lambda: 3,
                "_current_autograd_node": lambda: SimpleNamespace(name=lambda: "MmBackward0"),
            },
            "MmBackward0",
        ),
    ],
)
def test_the_backward_node(functions: dict[str, object], name: str | None) -> None:
    """Outside a backward pass there is none; where a version cannot name it, it has no name."""
    assert name == backward_node(SimpleNamespace(_C=SimpleNamespace(**functions)))
