"""What an integration of an inference engine says to the monitor: `sdk.ServedEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torchmem.sdk.engine import EnginePart, EngineSource
from torchmem.sdk.oom.ending import library_oom
from torchmem.sdk.safety.interruptions import shield
from torchmem.sdk.session import Session


class ServedEngine:
    """What an integration tells of the engine of this process; nothing here raises.

    Call `serve` once the engine is there, `changed` when it has allocated memory, `ready` after its
    warm-up, and wrap what gives memory back to the driver and takes it again in `moves`.
    """

    def __init__(self, session: Session) -> None:
        self._lifetime = session.lifetime
        self._errors = session.errors

    @shield
    def serve(self, source: EngineSource) -> None:
        """Publish the memory of this engine."""
        self._part.source = source
        self._read(None)

    @shield
    def changed(self) -> None:
        """Read what the engine holds now, and publish it."""
        self._read(None)

    @shield
    def ready(self) -> None:
        """Note that the engine's warm-up has ended: peaks count from now on.

        If the engine is alone in this process, PyTorch's peaks are reset once; `torch.cuda` and
        `torch.accelerator` still show the script the values since its own latest reset.
        """
        self._read(self._part.ready)

    def wakes(self, parts: Iterable[str] | None = None, timeout: float = 30.0) -> None:
        """Make room for the engine, or for some of its parts, before it wakes up.

        If the driver has too little free memory, the callbacks of `on_pressure` are called and the
        cache is emptied. With the tier `neighbors` of the setting `release`, other processes of
        this user are asked too, for at most `timeout` seconds.
        """
        part, release = self._part, self._lifetime.release
        part.waking = None if parts is None else frozenset(parts)
        if release is not None and part.device is not None and part.asleep_bytes:
            release.make_room(part.asleep_of(parts), timeout, part.device)

    @contextmanager
    def moves(self, *, sleeps: bool = False) -> Iterator[None]:
        """Mark a call in which the engine gives memory back to the driver or takes it again.

        `sleeps`: it goes to sleep. Nothing is released meanwhile, and what is left is published
        afterwards, also if the call fails.
        """
        part = self._part
        part.is_moving = True
        try:
            yield
        except Exception as error:
            self._on_error(error, wakes=not sleeps)
            raise
        finally:
            part.is_moving = False
            self._read(part.slept if sleeps else None)

    @property
    def _part(self) -> EnginePart:
        return self._lifetime.context.engine

    @shield
    def _on_error(self, error: BaseException, *, wakes: bool) -> None:
        """Count an OOM of the engine's own allocator, which the engine may survive."""
        with self._errors.suppress("exit"):
            oom = library_oom(error)
            if oom is not None and wakes:
                self._part.changed()
                oom = self._part.failed_wake_up(oom)
            if oom is not None:
                self._lifetime.monitor.on_library_oom(oom)

    @shield
    def _read(self, after: Callable[[], None] | None) -> None:
        with self._errors.suppress("engine"):
            if self._lifetime.monitor.is_running:
                self._part.changed()
                self._lifetime.monitor.read_here(after)
