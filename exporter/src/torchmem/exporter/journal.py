"""Tells the log once when a GPU, or NVML as a whole, stops answering, and once when it is back."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torchmem.exporter.gpu import GpuLabels
from torchmem.exporter.reading import Reading

_log = logging.getLogger(__name__)

_NVML: GpuLabels = ("", "")  # in the place of a GPU


class Journal:
    """Remembers who does not answer. `deadline_seconds`: how long a reading is waited for."""

    def __init__(self, deadline_seconds: float) -> None:
        self._late = f"within the deadline of {deadline_seconds:g} s"
        self._silent: frozenset[GpuLabels] = frozenset()

    def note(self, reading: Reading) -> None:
        """Log what is new in this reading; only one that came to an end says who is back."""
        silent = self._silent_in(reading)
        for labels in silent.keys() - self._silent:
            _log.warning("%s %s", _name(labels), silent[labels])
        ended = not reading.reason
        for labels in self._silent - silent.keys() if ended else ():
            _log.info("%s answers again", _name(labels))
        self._silent = frozenset(silent) if ended else self._silent | silent.keys()

    def _silent_in(self, reading: Reading) -> Mapping[GpuLabels, str]:
        asked, left_alone = reading.asked, f"{self._late}: it is left alone until it does"
        late = (
            {}
            if asked is None
            else {asked: f"did not answer the collector {reading.collector} {left_alone}"}
        )
        lost = {labels: _fault(code) for labels, code in reading.lost.items()}
        hung = dict.fromkeys(reading.hung, f"did not answer {left_alone}")
        stuck = (
            {_NVML: f"did not answer {left_alone}"}
            if reading.reason == "timeout" and asked is None
            else {}
        )
        return {**stuck, **lost, **hung, **late}


def _fault(code: int | None) -> str:
    return "is lost" if code is None else f"is lost: NVML return code {code}"


def _name(labels: GpuLabels) -> str:
    index, uuid = labels
    return "NVML" if labels == _NVML else f"GPU {index} ({uuid or 'UUID unknown'})"
