"""Waiting for signals that are blocked."""

from __future__ import annotations

import signal
from collections.abc import Collection


def wait_for_signal(signals: Collection[int], seconds: float) -> int | None:
    """Return the number of the signal that arrives, or None if none does within `seconds`.

    If the process was stopped meanwhile (SIGSTOP, Ctrl-Z) for longer than that, Python returns
    signal 0 when it continues (`signal_sigtimedwait_impl` in CPython's Modules/signalmodule.c).
    """
    received = signal.sigtimedwait(signals, seconds)
    return received.si_signo if received and received.si_signo in signals else None
