"""The outputs that settings ask for: a textfile, a port, and OTLP.

Port and OTLP start in the background thread, when the process is first published. Their modules
are imported only then, because prometheus_client and OpenTelemetry are slow to import.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.sample.errors import UsageError
from torchmem.sample.sample import Sample
from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.safety.errors import Errors, Stage
from torchmem.sdk.settings import Settings

if TYPE_CHECKING:
    from torchmem.metrics.otlp import Push
    from torchmem.sdk.publish.endpoint import Endpoint
    from torchmem.sdk.publish.outputs import Textfile

LAST_SEND_SECONDS = 0.5

Read = Callable[[], Sample]
"""Returns the current state."""


class TextfileOutput(Part):
    """The setting `textfile`."""

    stage: Stage = "textfile"

    def __init__(self, path: Path) -> None:
        self._given = path
        self._file: Textfile | None = None

    def begin(self) -> None:
        """Import what writes the file."""
        from torchmem.sdk.publish.outputs import Textfile

        self._file = Textfile(self._given)

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Write the file, in a routine publication only if it is old."""
        if self._file:
            (self._file.refresh if routine else self._file.write)(sample)

    def end(self, *, may_read: bool) -> None:  # noqa: ARG002
        """Remove the file."""
        if self._file:
            self._file.remove()


class OwnPort(Part):
    """The setting `port`: serves the series of this process."""

    stage: Stage = "endpoint"

    def __init__(self, settings: Settings, local_rank: int, read: Read, errors: Errors) -> None:
        self._settings = settings
        self._local_rank = local_rank
        self._read = read
        self._errors = errors
        self._endpoint: Endpoint | None = None

    @property
    def url(self) -> str | None:
        """The address of the series."""
        return self._endpoint.url if self._endpoint else None

    def at_publish(self, sample: Sample, *, routine: bool) -> None:  # noqa: ARG002
        """Listen, and again if the script has closed the descriptor."""
        if not routine:
            return
        if self._endpoint and not self._endpoint.is_open:
            self._endpoint.close()
            self._endpoint = None
        if self._endpoint is None:
            self._listen()

    def _listen(self) -> None:
        from torchmem.sdk.publish.endpoint import Endpoint
        from torchmem.sdk.publish.outputs import registry
        from torchmem.sdk.publish.page import Page

        page = Page(registry(self._read))
        self._endpoint = Endpoint.open(self._settings, self._local_rank, page, self._errors)

    def complete(self, sample: Draft) -> None:
        """Add the address."""
        sample.add(metrics_url=self.url)

    def end(self, *, may_read: bool) -> None:  # noqa: ARG002
        """Stop listening."""
        if self._endpoint:
            self._endpoint.close()


class OtlpOutput(Part):
    """The setting `otlp`: sends the series of this process."""

    stage: Stage = "otlp"

    def __init__(self, read: Read, errors: Errors) -> None:
        self._read = read
        self._errors = errors
        self._push: Push | None = None
        self._has_started = False

    def at_publish(self, sample: Sample, *, routine: bool) -> None:  # noqa: ARG002
        """Start sending here, because the import would delay the training thread."""
        if self._has_started or not routine:
            return
        self._has_started = True
        try:
            from torchmem.sdk.publish.otlp import start
        except ModuleNotFoundError as error:
            raise UsageError("the setting otlp needs pip install 'torchmem[otlp]'.") from error
        self._push = start(self._read, self._after_push)

    def _after_push(self, failure: Exception | None) -> None:
        if failure:
            self._errors.count("otlp", failure)

    def end(self, *, may_read: bool) -> None:  # noqa: ARG002
        """Send the last state."""
        if self._push:
            self._push.close(LAST_SEND_SECONDS)
