"""Functions of the script that free memory: whatever they do, training goes on, and it is said."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from torchmem.sdk.release.pressure_hooks import MAX_HOOK_SECONDS, PressureHooks


class Memory:
    """Memory that hooks free; `allocated` is what PyTorch counts."""

    def __init__(self, allocated: int = 1000) -> None:
        self.allocated = allocated

    def freeing(self, size: int, returned: Any = None) -> Callable[[int], Any]:
        """Return a hook that frees as much in each call, whatever it returns."""

        def free(wanted: int) -> Any:
            self.allocated -= size
            return returned

        return free


def call(hooks: PressureHooks, memory: Memory, wanted: int = 100) -> int:
    """Call the hooks for as many bytes."""
    return hooks.call(wanted, lambda: memory.allocated)


IMPOSSIBLE = [float("nan"), float("inf"), -float("inf"), 10**400, -5, "100", object(), [100], True]


@pytest.mark.parametrize("returned", IMPOSSIBLE, ids=lambda value: str(value)[:9])
def test_a_hook_that_returns_no_possible_number_is_judged_by_what_it_freed(returned: Any) -> None:
    """It stays if it freed something, and is dropped after three calls if not."""
    memory, good, bad = Memory(), PressureHooks(), PressureHooks()
    good.add(memory.freeing(30, returned), 0)
    bad.add(memory.freeing(0, returned), 0)
    freed = [(call(good, memory), call(bad, memory)) for _ in range(4)]

    assert freed == [(30, 0)] * 4
    assert (good.dropped["empty"], bad.dropped["empty"]) == (0, 1)


def test_a_hook_that_says_it_can_spare_nothing_stays() -> None:
    """An honest 0 is not a reason to drop a hook: it may have something to spare later."""
    memory, hooks, called = Memory(), PressureHooks(), list[int]()

    def give(wanted: int) -> int:
        called.append(wanted)
        return 0

    hooks.add(give, 0)
    for _ in range(5):
        call(hooks, memory)

    assert called == [100] * 5


def test_what_a_hook_returns_does_not_stay_alive() -> None:
    """A hook may return the tensor that it gives up; its memory counts as freed."""
    memory, hooks = Memory(), PressureHooks()

    class Tensor:
        def __del__(self) -> None:
            memory.allocated -= 40

    hooks.add(lambda wanted: Tensor(), 0)

    assert call(hooks, memory) == 40


def test_what_a_hook_freed_before_it_raised_counts() -> None:
    """The next hook is asked only for the rest, and the one that raised is gone."""
    memory, hooks = Memory(), PressureHooks()
    asked: list[int] = []

    def fail(wanted: int) -> None:
        held = [memory]
        memory.allocated -= 60
        raise ValueError(held)

    hooks.add(fail, 0)
    hooks.add(asked.append, 1)

    assert (call(hooks, memory), asked) == (60, [40])
    assert hooks.dropped["raised"] == 1


class UnspeakableError(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_unspeakable(wanted: int) -> None:
    raise UnspeakableError


def empty_queue(wanted: int) -> None:
    queue.SimpleQueue[int]().get_nowait()  # C code raises an exception without arguments


def exhausted(wanted: int) -> None:
    exhausted(wanted)


def broken(wanted: int) -> None:
    assert wanted < 0


@pytest.mark.parametrize("hook", [raise_unspeakable, empty_queue, exhausted, broken])
def test_an_error_of_a_hook_is_not_raised(
    hook: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a hook raises, it is dropped with a warning that names it."""
    memory, hooks = Memory(), PressureHooks()
    hooks.add(hook, 0)

    assert (call(hooks, memory), call(hooks, memory)) == (0, 0)
    assert (hooks.dropped["raised"], hooks.exist) == (1, False)
    assert f"no longer calls the pressure hook {hook.__name__}: it raised" in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_end_of_the_script_in_a_hook_reaches_it(kind: type[BaseException]) -> None:
    """Ctrl-C and sys.exit in a hook are raised; the hook stays and can be called again."""
    memory, hooks, calls = Memory(), PressureHooks(), []

    def interrupted(wanted: int) -> None:
        calls.append(wanted)
        raise kind

    hooks.add(interrupted, 0)
    for _ in range(2):
        with pytest.raises(kind):
            call(hooks, memory)

    assert (calls, hooks.is_running) == ([100, 100], False)


def test_a_hook_may_remove_and_add_hooks() -> None:
    """One that another has removed is not called; one that is added is called the next time."""
    memory, hooks, calls = Memory(), PressureHooks(), []

    def change(wanted: int) -> None:
        calls.append("change")
        memory.allocated -= 1
        later.remove()
        first.remove()
        hooks.add(lambda wanted: calls.append("new"), 5)

    first = hooks.add(change, 0)
    later = hooks.add(lambda wanted: calls.append("later"), 1)
    call(hooks, memory)
    call(hooks, memory)

    assert calls == ["change", "new"]


def test_a_hook_that_needs_memory_itself_calls_no_hooks() -> None:
    """A call inside a call frees nothing."""
    memory, hooks, nested = Memory(), PressureHooks(), []
    hooks.add(lambda wanted: nested.append(call(hooks, memory)), 0)
    call(hooks, memory)

    assert nested == [0]


def test_a_hook_that_hangs_is_named_while_it_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says which hook, for how long, and where it is; it comes once, and not early."""
    memory, now = Memory(), [0.0]
    hooks, is_inside, may_end = PressureHooks(lambda: now[0]), threading.Event(), threading.Event()

    def stuck(wanted: int) -> None:
        is_inside.set()
        may_end.wait(60)

    hooks.add(stuck, 0)
    hooks.watch()
    training = threading.Thread(target=call, args=(hooks, memory))
    training.start()
    is_inside.wait(60)
    for seconds in (MAX_HOOK_SECONDS, 7.0, 99.0):
        now[0] = seconds
        hooks.watch()
    said = [record.getMessage() for record in caplog.records]
    may_end.set()
    training.join()
    hooks.watch()

    line = stuck.__code__.co_firstlineno + 2
    name = stuck.__qualname__
    assert len(said) == 1
    assert f"the pressure hook {name} has run for 7 s, and the training waits for it: " in said[0]
    assert f"{__file__}:{line} in " in said[0]
    assert hooks.dropped["slow"] == 1


def test_nothing_is_counted_before_a_hook_is_registered() -> None:
    """Without hooks the counters are absent; with one, all of them start at 0."""
    hooks = PressureHooks(count().__next__)
    before = dict(hooks.dropped)
    hooks.add(lambda wanted: None, 0)

    assert (before, hooks.dropped) == ({}, {"raised": 0, "slow": 0, "empty": 0})
