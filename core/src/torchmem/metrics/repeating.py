"""A task that is repeated in a daemon thread and never delays the end of the process."""

from __future__ import annotations

from collections.abc import Callable

from torchmem.sample.native_threads import Lock, Thread

FIRST_SECONDS = 1.0


class Repeating:
    """Calls `act` a second after `start`, then every `interval` seconds, and once at the end.

    `report` is called after each attempt with the exception that it raised, or None. `begin` and
    `end` are called in the same thread, before the first attempt and after the last; if `begin`
    raises, that is reported and nothing else happens. `given_up` is True when `close` did not wait
    for the end of an attempt, which then should have no effect.
    """

    def __init__(  # noqa: PLR0913 - keyword arguments of one call
        self,
        name: str,
        act: Callable[[], None],
        interval: float,
        report: Callable[[Exception | None], None],
        *,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._act, self._begin, self._end = act, begin, end
        self._interval = interval
        self._report = report
        self.given_up = False
        self._running = Lock()  # held until `close`
        self._running.acquire()
        self._works: bool | None = None  # unknown until the first attempt
        self._thread = Thread(self._run, name)

    def start(self) -> None:
        """Start the thread, which may call `act` before this returns."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Act once more and wait at most `seconds`, unless the last attempt failed."""
        if self._running.locked():
            self._running.release()
        if self._works is not False:
            self._thread.join(seconds)
        self.given_up = self._thread.is_alive()

    def _run(self) -> None:
        if not self._attempt(self._begin):
            self._works = False
            return
        pause = min(FIRST_SECONDS, self._interval)
        while not self._running.acquire(timeout=pause):
            self._works = bool(self._works)  # no caller waits for the first attempt
            self._works = self._attempt(self._act)
            pause = self._interval
        if self._works is not False:
            self._attempt(self._act)
        self._attempt(self._end)

    def _attempt(self, call: Callable[[], None]) -> bool:
        failure = None
        try:
            call()
        except Exception as error:  # noqa: BLE001 - reported
            failure = error
        if failure or call == self._act:
            self._report(failure)
        return failure is None
