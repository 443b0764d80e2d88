"""Records PyTorch's memory history for the SDK, without interfering with the script's recording.

PyTorch has one recording for the whole process, and does not say who started it. All Python code
starts and stops it through two functions of `torch._C` (torch/cuda/memory.py, 2.1 to 2.15). They
are wrapped while the SDK records, so that a call by the script ends the SDK's recording first: the
script's recording is then as it would be without the SDK.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal, TypeVar

from torchmem.sample.native_threads import Lock
from torchmem.sdk.safety.interruptions import call_holding

T = TypeVar("T")

Kind = Literal["trace", "stacks", "history"]
"""Allocations and frees, the stacks of live blocks, or both."""

FUNCTIONS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
# How long a call waits for another thread to start or stop a recording.
WAIT_SECONDS = 10.0


class _Own(str):
    """Marks a call as the SDK's; to PyTorch, it is a str."""

    __slots__ = ()


# The parameter that records the annotations (`torch.profiler.record_function`) of all threads.
ALL_THREADS = "global_record_annotations"
# The argument `stacks` of all the SDK's calls.
STACKS = _Own("python")


class OwnRecording:
    """Starts and stops the SDK's recording. `kind` is what it records now, None if it does not."""

    def __init__(self, torch: Any, is_recording: Callable[[], bool]) -> None:
        """`is_recording` is `torch._C._cuda_isHistoryEnabled`."""
        self.kind: Kind | None = None
        self._torch = torch
        self._is_recording = is_recording
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        self._lock = Lock(reentrant=True)  # reentrant for a signal handler that records

    def start(self, kind: Kind, **arguments: object) -> bool:
        """Call `_record_memory_history`, unless something is being recorded already."""
        return self._locked(lambda: self._start(kind, arguments))

    def _start(self, kind: Kind, arguments: dict[str, object]) -> bool:
        if self._is_recording():
            return False
        self._wrap()
        self.kind = kind
        try:
            self._record(**arguments)
        except BaseException:
            self._end()
            raise
        return True

    def stop(self, kinds: Sequence[Kind], read: Callable[[], T]) -> T | None:
        """Return what `read` returns, and stop recording.

        Return None if no recording of these kinds runs: the script has ended or replaced it.
        """
        return self._locked(lambda: self._stop(kinds, read))

    def _stop(self, kinds: Sequence[Kind], read: Callable[[], T]) -> T | None:
        if self.kind not in kinds:
            return None
        try:
            return read()
        finally:
            self._end()

    def _end(self) -> None:
        self.kind = None
        self._record(enabled=None)
        self._unwrap()

    def _record(self, **arguments: object) -> None:
        """Call it with annotations of all threads, where this version can record them.

        It registers a callback for those of one thread only until the end of a backward pass, if
        it is called there. It then cannot remove the callback, and says so on stderr.
        """
        record = self._torch.cuda.memory._record_memory_history  # noqa: SLF001
        if ALL_THREADS in signature(record).parameters:
            arguments[ALL_THREADS] = True
        record(stacks=STACKS, **arguments)

    def _locked(self, call: Callable[[], T]) -> T:
        return call_holding(self._lock, WAIT_SECONDS, call)

    def _wrap(self) -> None:
        module = self._torch._C  # noqa: SLF001
        for name in FUNCTIONS:
            function = getattr(module, name, None)
            if function is not None and name not in self._wrapped:
                wrapper = self._wrapper(function)
                self._wrapped[name] = function, wrapper
                setattr(module, name, wrapper)

    def _unwrap(self) -> None:
        """Restore the functions, except one that something else has wrapped in the meantime."""
        module = self._torch._C  # noqa: SLF001
        for name, (function, wrapper) in self._wrapped.items():
            if getattr(module, name) is wrapper:
                setattr(module, name, function)
        self._wrapped.clear()

    def _wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def record(*arguments: Any, **keywords: Any) -> Any:
            if any(argument is STACKS for argument in arguments):
                return function(*arguments, **keywords)
            return self._locked(lambda: self._pass_on(function, arguments, keywords))

        return record

    def _pass_on(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if self.kind is not None:
            self._end()
        return function(*arguments, **keywords)
