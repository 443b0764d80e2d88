"""Reads Python stacks, thread and autograd node at an OutOfMemoryError.

Only strings and numbers are kept. A reference to a frame or a traceback would keep the tensors in
its local variables alive.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from torchmem.explain.call_stack import CallStack, Frame, Origin, package_of
from torchmem.sample.untrusted import MAX_TEXT

# Of deeper stacks, the innermost and the outermost frames are kept.
MAX_INNER_FRAMES = 40
MAX_OUTER_FRAMES = 8
MAX_WALKED_FRAMES = 10_000

# What torch.utils.data writes into the text of an exception that it carries to the main thread.
_CARRIED = r'^  File "([^"\n]+)", line (\d{1,9}), in (\S+)$'

# Code, line, and the name of its module.
_Entry = tuple[CodeType, "int | None", object]


def calling_stack() -> CallStack:
    """Return the stack of this thread, without the SDK's own innermost frames."""
    entries = _walk(sys._getframe(1))  # noqa: SLF001 - documented, and the only way
    return _stack(_without_sdk(entries))


def main_thread_stack() -> CallStack | None:
    """Return the stack of the main thread; None in the main thread itself."""
    ident = threading.main_thread().ident
    if ident is None or ident == threading.get_ident():
        return None
    stack = thread_stack(ident)
    return stack if stack.frames else None


def thread_stack(ident: int) -> CallStack:
    """Return the stack of the thread with this identifier; empty if it has ended."""
    return _stack(_walk(sys._current_frames().get(ident)))  # noqa: SLF001 - documented


def thread_name() -> str | None:
    """Return the name of this thread; None in the main thread and in threads of C++.

    `threading.current_thread` would add threads of C++ to Python's list for good, and
    `threading.enumerate` takes a lock.
    """
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]  # noqa: SLF001
    if thread is None or thread is threading.main_thread():
        return None
    return str(thread.name)[:MAX_TEXT]


def backward_node(torch: Any) -> str | None:
    """Return the name of `torch._C._current_autograd_node()` (2.13); "" where it is not known.

    None unless `_current_graph_task_id()` shows a backward pass in this thread.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001
    if task is None or task() == -1:
        return None
    current = getattr(torch._C, "_current_autograd_node", None)  # noqa: SLF001
    node = current() if current else None
    return "" if node is None else str(node.name())


def calling_origin(backward: str | None, phase: str | None) -> Origin:
    """Return where the allocation of this thread came from."""
    phase = None if phase is None else str(phase)[:MAX_TEXT]
    return Origin(calling_stack(), main_thread_stack(), thread_name(), backward, phase)


def raising_origin(traceback: TracebackType | None, text: str) -> Origin:
    """Return where an exception was raised, by its traceback.

    `text` is the exception's: one that torch.utils.data carried from a thread or a process to the
    main thread has the stack of its origin there.
    """
    raised = _stack(reversed(list(_walk_traceback(traceback))))
    carried = [
        Frame(_shortened(file), int(line), function[:MAX_TEXT], package_of(file))
        for file, line, function in re.findall(_CARRIED, text, re.MULTILINE)[-MAX_INNER_FRAMES:]
    ]
    return Origin(CallStack(tuple(reversed(carried))), raised) if carried else Origin(raised)


def _walk(frame: FrameType | None) -> Iterator[_Entry]:
    for _ in range(MAX_WALKED_FRAMES):
        if frame is None:
            return
        # Globals given to `exec` may be a subclass of dict with a `get` of its own.
        yield frame.f_code, frame.f_lineno, dict.get(frame.f_globals, "__name__")
        frame = frame.f_back


def _walk_traceback(traceback: TracebackType | None) -> Iterator[_Entry]:
    for _ in range(MAX_WALKED_FRAMES):
        if traceback is None:
            return
        frame = traceback.tb_frame
        yield frame.f_code, traceback.tb_lineno, dict.get(frame.f_globals, "__name__")
        traceback = traceback.tb_next


def _without_sdk(entries: Iterable[_Entry]) -> Iterator[_Entry]:
    inside = True
    for entry in entries:
        inside = inside and str(entry[2]).startswith("torchmem.sdk.")
        if not inside:
            yield entry


def _stack(entries: Iterable[_Entry]) -> CallStack:
    """Return the frames of `entries`, which come from the innermost outwards."""
    inner: list[_Entry] = []
    outer: deque[_Entry] = deque(maxlen=MAX_OUTER_FRAMES)
    omitted = 0
    for entry in entries:
        if len(inner) < MAX_INNER_FRAMES:
            inner.append(entry)
        else:
            omitted += len(outer) == MAX_OUTER_FRAMES
            outer.append(entry)
    return CallStack(tuple(_frame(*entry) for entry in (*inner, *outer)), omitted)


def _frame(code: CodeType, line: int | None, module: object) -> Frame:
    function: str = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
    package = package_of(code.co_filename, module if isinstance(module, str) else "")
    return Frame(_shortened(code.co_filename), line, function[:MAX_TEXT], package)


def _shortened(file: str) -> str:
    """Return the last MAX_TEXT bytes of a path, which identify it better than the first ones."""
    data = file.encode(errors="surrogatepass")
    if len(data) <= MAX_TEXT:
        return file
    # The ellipsis has 3 bytes in UTF-8.
    return "…" + data[3 - MAX_TEXT :].decode(errors="ignore")
