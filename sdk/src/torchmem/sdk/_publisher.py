"""Where a process's state is published: its file in the run directory and, if asked for, a textfile and a port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchmem.core.rundir import sample_name
from torchmem.core.sample import Process, Sample
from torchmem.sdk._errors import Errors
from torchmem.sdk._publish import RunFile
from torchmem.sdk._settings import Settings

if TYPE_CHECKING:
    from torchmem.sdk._endpoint import Endpoint
    from torchmem.sdk._textfile import Textfile

LOCK_SECONDS = 1.0


class Publisher:
    """Called from the sampler, the OOM observer, a signal handler and at exit; never raises but when it is made."""

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        process: Process,
        errors: Errors,
        sample: Callable[[], Sample],
    ) -> None:
        """`sample` gives the state of the moment; nothing is written before the first `publish`."""
        self._settings = settings
        self._errors = errors
        self._sample = sample
        self._local_rank = process.local_rank or 0
        self._lock = threading.Lock()
        self._textfile: Textfile | None = None
        self._endpoint: Endpoint | None = None
        name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
        self.file = RunFile(settings.directory(environment), name)
        if settings.textfile is not None:
            from torchmem.sdk._textfile import Textfile

            self._textfile = Textfile(settings.textfile, process.rank)

    def open_endpoint(self) -> None:
        """Listen where a port was asked for."""
        with self._errors.swallow("endpoint"):
            if self._settings.port is not None:
                from torchmem.sdk._endpoint import Endpoint

                self._endpoint = Endpoint.open(self._settings, self._local_rank, self._sample)

    @property
    def url(self) -> str | None:
        """Address of the endpoint, if there is one."""
        return self._endpoint.url if self._endpoint else None

    def publish(self, *, news_only: bool = False) -> None:
        """Write the state of this moment everywhere; with `news_only` only where it is new or has grown old."""
        with self._errors.swallow("publish"):
            mine = self._lock.acquire(timeout=LOCK_SECONDS)
            try:
                (self.file.refresh if news_only else self.file.write)(self._sample())
            finally:
                if mine:
                    self._lock.release()
        with self._errors.swallow("textfile"):
            if self._textfile:
                (self._textfile.refresh if news_only else self._textfile.write)(self._sample())

    def close(self) -> None:
        """The process ends: the file in the run directory stays, the rest goes. Raises OSError."""
        if self._textfile:
            self._textfile.remove()
        if self._endpoint:
            self._endpoint.close()

    def close_in_child(self) -> None:
        """In a forked child: let the parent's port go."""
        if self._endpoint:
            self._endpoint.close_in_child()
