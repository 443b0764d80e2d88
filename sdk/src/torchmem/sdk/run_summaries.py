"""The part that leaves a summary of the run at its end, for `torchmem compare`."""

from __future__ import annotations

import re
from pathlib import Path

from torchmem.explain.run_summary import (
    MAX_SUMMARY_BYTES,
    SUMMARY_SUFFIX,
    encode,
    summarize,
    summary_name,
)
from torchmem.sample.run_directory import PROCESS_FORM, replace_file
from torchmem.sample.sample import Sample
from torchmem.sdk.oom.report_writer import keep_newest
from torchmem.sdk.part import Part
from torchmem.sdk.publish.sample_file import restore_directory
from torchmem.sdk.safety.errors import Stage

MAX_SUMMARIES_PER_USER = 256
_NAME = re.compile(rf"{PROCESS_FORM}{re.escape(SUMMARY_SUFFIX)}")


class RunSummaries(Part):
    """Writes the summary beside the sample file `path`, and keeps the newest ones of the user."""

    stage: Stage = "report"

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(summary_name(path.name))

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Write it if this is the last sample. Raises OSError, or ValueError if it is too large."""
        if routine or sample.ended is None:
            return
        content = encode(summarize(sample, sample.ended))
        if len(content) > MAX_SUMMARY_BYTES:
            raise ValueError(f"the summary has {len(content)} bytes")
        restore_directory(self._path.parent)
        replace_file(self._path, content)
        keep_newest(self._path.parent, MAX_SUMMARIES_PER_USER, _NAME)
