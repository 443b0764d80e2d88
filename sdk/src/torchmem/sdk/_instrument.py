"""`instrument()`: the one line in the training script."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from torchmem.core.backend import Backend
from torchmem.sdk._identity import is_multiprocessing_child
from torchmem.sdk._idle import IdleBackend
from torchmem.sdk._session import Session
from torchmem.sdk._settings import Settings, SettingsKeywords, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("torchmem")
_lock = threading.Lock()
_current: Session | None = None


def instrument(*, backend: Backend | None = None, **settings: Unpack[SettingsKeywords]) -> Session:
    """Watch this process's GPU memory; call it once, before or after CUDA starts.

    A second call returns the running session. Nothing happens before CUDA is initialised: no thread, no file, no
    CUDA call. Settings are keywords, or `TORCHMEM_*` environment variables; see `torchmem.sdk._settings.Settings`.
    `backend` replaces PyTorch, for simulations and tests.

    Raises UsageError for a misspelt setting and nothing else: without torch, or when anything else goes wrong, the
    session stays idle and one warning is logged.
    """
    resolved = resolve(settings, os.environ)
    global _current  # noqa: PLW0603 - one process, one session
    if _current is None or _current.closed:
        backend = _usable(resolved, backend)  # before the lock: at the import of torch a tool may come here as well
    with _lock:
        if _current is None or _current.closed:
            _current = _start(resolved, backend)
        elif settings and _current.settings != resolved:
            log.warning("instrument() was called before; its first settings stay in force")
        return _current


def _renew_lock() -> None:
    """In a forked child nobody is left who could release it."""
    global _lock  # noqa: PLW0603 - it is the module's
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _start(settings: Settings, backend: Backend | None) -> Session:
    try:
        session = Session(settings, _usable(settings, backend), os.environ)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the training script
        log.warning("torchmem watches nothing: it could not start (%s: %s)", type(error).__name__, error)
        return Session(settings, IdleBackend(), os.environ)
    atexit.register(session.at_exit)
    os.register_at_fork(after_in_child=session.after_fork)
    if is_multiprocessing_child():
        # Such a child leaves by os._exit, which skips atexit.
        import multiprocessing.util

        multiprocessing.util.Finalize(None, session.at_exit, exitpriority=0)
    return session


def _usable(settings: Settings, backend: Backend | None) -> Backend:
    if not settings.enabled:
        return IdleBackend()
    if backend is not None:
        return backend
    try:
        import_module("torch")  # by itself first: whoever waits for it may import `_torch` as well
        from torchmem.sdk._torch import TorchBackend

        return TorchBackend()
    except Exception as error:  # noqa: BLE001 - a broken torch must fail in the user's code, not in ours
        log.warning("torchmem watches nothing: PyTorch cannot be used here (%s: %s)", type(error).__name__, error)
        return IdleBackend()
