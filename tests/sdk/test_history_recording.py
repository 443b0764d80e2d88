"""Whose memory history PyTorch records, on a fake of its two functions."""

from __future__ import annotations

import functools
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from torchmem.sdk.pytorch.history_recording import FUNCTIONS, OwnRecording


class FakeTorch(SimpleNamespace):
    """PyTorch's one recording. `calls` lists what arrived in C++; a bad mode raises."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []
        self.mode: object = None
        self._C = SimpleNamespace(**dict.fromkeys(FUNCTIONS, self._record))
        memory = SimpleNamespace(_record_memory_history=self.record, is_fake=True)
        self.cuda = SimpleNamespace(memory=memory)
        self.recording = OwnRecording(self, lambda: self.mode is not None)

    def _record(self, enabled: object, stacks: str = "all") -> None:
        self.calls.append(enabled)
        if enabled == "bad":
            raise RuntimeError("bad mode")
        self.mode = enabled

    def record(self, enabled: object = "all", stacks: str = "all", **_: object) -> None:
        """Record as `torch.cuda.memory._record_memory_history` does."""
        self._C._cuda_record_memory_history(enabled, stacks)

    def natives(self) -> bool:
        """Return whether both functions are the original ones."""
        return all(value == self._record for value in vars(self._C).values())


@pytest.fixture
def torch() -> Any:
    return FakeTorch()


def test_its_own_recording_starts_and_stops(torch: FakeTorch) -> None:
    """What is read before the stop is returned, and PyTorch's functions are the original ones."""
    assert torch.recording.start("trace", enabled="all")
    assert (torch.recording.kind, torch.mode, torch.natives()) == ("trace", "all", False)
    assert torch.recording.stop(("trace",), lambda: 5) == 5
    assert (torch.recording.kind, torch.mode, torch.natives()) == (None, None, True)


def test_the_scripts_recording_is_never_stopped(torch: FakeTorch) -> None:
    """Neither one from before nor one that replaces the SDK's, whose entries are cleared first."""
    torch.record("state")
    assert not torch.recording.start("trace", enabled="all")
    torch.record(None)
    assert torch.recording.start("trace", enabled="all")
    torch.record("state")

    assert torch.recording.stop(("trace",), lambda: 5) is None
    assert torch.calls == ["state", None, "all", None, "state"]
    assert (torch.mode, torch.natives()) == ("state", True)


def test_the_legacy_function_counts_as_well(torch: FakeTorch) -> None:
    """A start with a bool, which PyTorch passes to another function, takes over too."""
    torch.recording.start("stacks", enabled="state")
    torch._C._cuda_record_memory_history_legacy(True)

    assert (torch.recording.kind, torch.mode) == (None, True)


def test_a_recording_of_another_kind_stays(torch: FakeTorch) -> None:
    """One part of the SDK does not stop the recording of another."""
    torch.recording.start("history", enabled="all")

    assert torch.recording.stop(("trace",), lambda: 5) is None
    assert (torch.recording.kind, torch.mode) == ("history", "all")


def test_an_invalid_call_of_the_script_raises_its_error(torch: FakeTorch) -> None:
    """It reaches the script."""
    torch.recording.start("trace", enabled="all")

    with pytest.raises(RuntimeError, match="bad mode"):
        torch.record("bad")


def test_a_start_that_fails_leaves_nothing(torch: FakeTorch) -> None:
    """PyTorch's functions are restored, and the next start is possible."""
    with pytest.raises(RuntimeError, match="bad mode"):
        torch.recording.start("trace", enabled="bad")

    assert (torch.recording.kind, torch.mode, torch.natives()) == (None, None, True)
    assert torch.recording.start("trace", enabled="all")


def test_a_reader_that_fails_still_stops(torch: FakeTorch) -> None:
    """An error while the entries are read does not leave PyTorch recording."""
    torch.recording.start("trace", enabled="all")

    with pytest.raises(ZeroDivisionError):
        torch.recording.stop(("trace",), lambda: 1 / 0)
    assert (torch.mode, torch.natives()) == (None, True)


def test_a_wrapper_of_another_tool_stays(torch: FakeTorch) -> None:
    """If another tool wraps the function meanwhile, its wrapper stays, and both still work."""
    torch.recording.start("trace", enabled="all")
    theirs = functools.partial(torch._C._cuda_record_memory_history)
    torch._C._cuda_record_memory_history = theirs
    torch.recording.stop(("trace",), lambda: None)

    assert theirs is torch._C._cuda_record_memory_history
    for _ in range(3):
        assert torch.recording.start("trace", enabled="all")
        torch.record("state")
        assert (torch.recording.kind, torch.mode) == (None, "state")
        torch.record(None)


def test_threads_that_record_at_the_same_time(torch: FakeTorch) -> None:
    """However a script's thread and the SDK alternate, the script's recording is not stopped."""
    lost, ended, own = [], threading.Event(), 0

    def script() -> None:
        number = 0
        while number < 2_000 or own <= 10:  # however seldom the other thread gets a processor
            number += 1
            torch.record("state")
            if torch.mode != "state":
                lost.append(torch.mode)
            torch.record(None)
            time.sleep(0)  # lets the other thread record
        ended.set()

    thread, interval = threading.Thread(target=script), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while not ended.is_set():
            own += torch.recording.start("trace", enabled="all")
            torch.recording.stop(("trace",), lambda: None)
        thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert (lost, torch.natives()) == ([], True)
